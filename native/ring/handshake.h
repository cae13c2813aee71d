// The handshake: connects to a daemon's ring socket, receives its descriptors, and checks all it says before anything
// is mapped. A daemon of another version or any other program behind the socket gives an error.
#pragma once
#include <array>
#include <cstdint>

#include "common/unique_fd.h"
#include "engram/client.h"
#include "ring/catalogue.h"

namespace engram {

struct Handshake {
  UniqueFd socket;
  UniqueFd ring;
  UniqueFd arena;
  UniqueFd state;
  UniqueFd doorbell;
  engram_welcome welcome{};
  Catalogue catalogue;
};

// Returns 0, or a status with `error` filled in. ENGRAM_CLIENT_AGAIN where a signal came.
int shake_hands(const char* path, const engram_connect_options& options, Handshake& handshake, engram_error* error);

// Tells the daemon that the ring is mapped for writing: it then seals the ring and begins to serve the session.
int send_mapped(int socket, engram_error* error);

}  // namespace engram
