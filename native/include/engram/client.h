/* The ring client: fetches rows of the daemon's tables through shared memory. docs/protocol.md says how the ring works.
 *
 *   engram_session *session = engram_connect("/run/engramd/engramd.sock", NULL, &error);
 *   engram_session_layers(session, records, capacity)          which layers are served
 *   ticket = engram_submit(session, &layer, ids, ...)           returns at once
 *   rows = engram_wait(session, ticket, timeout_ms, &error)     a pointer into the reply arena
 *   engram_release(session, ticket)                             from here on `rows` must not be used
 *   engram_fetch_run(session, &fetch, timeout_ms, &error)       or all three, for any number of rows, into own memory
 *   engram_session_free(session)
 *
 * Threads: every function may be called from any number of threads at once, except that after
 * engram_session_free only engram_release may be called for its session, and that one engram_fetch belongs to one
 * thread at a time. Submit, wait, release and fetch allocate no memory. Fork: in a child every function refuses an
 * inherited session with ENGRAM_CLIENT_CLOSED, and free is allowed. The child's copies of the descriptors are closed at
 * the fork itself; rows of the parent's tickets are not mapped there. Results: 0 or the value described; else a status,
 * ENGRAM_STATUS_* from the daemon or ENGRAM_CLIENT_* from here, and `error` (which may be NULL) says more. */
#pragma once
#include <stdint.h>

#include "engram/wire.h"
#ifdef __cplusplus
extern "C" {
#endif
/* cdef-begin */
#define ENGRAM_CLIENT_AGAIN 100    /* a signal came: handle it, then make the same call again */
#define ENGRAM_CLIENT_ARGUMENT 101 /* the caller's mistake: too many rows for a ticket, a bad width, ... */
#define ENGRAM_CLIENT_SYSTEM 102   /* a system call failed: error_number */
#define ENGRAM_CLIENT_PROTOCOL 103 /* the other side of the socket is no daemon that this client understands */
#define ENGRAM_CLIENT_CLOSED 104   /* the session is closed or the parent process's, or the ticket is released */

#define ENGRAM_CLIENT_FETCH_DEPTH 3

#define ENGRAM_CONNECT_WRITABLE_ARENA 1 /* map the arena for writing too: for devices that register no other memory */
#define ENGRAM_CONNECT_STREAM_SLOTS 2   /* ask for slots that a GPU stream can use */

typedef struct engram_session engram_session;

typedef struct engram_error {
  int32_t status;
  int32_t error_number; /* errno, or 0 */
  uint64_t position;    /* ENGRAM_STATUS_ROW_ID: flat index of the first bad id */
  int64_t row_id;       /* the row id that is bad, or the row that could not be served */
  uint64_t page;        /* ENGRAM_STATUS_PAGE_CORRUPT, ENGRAM_STATUS_READ_FAILED */
  char text[256];       /* a sentence, zero-terminated */
} engram_error;

typedef struct engram_connect_options {
  uint64_t arena_bytes; /* wanted; 0 = the daemon's choice */
  uint32_t timeout_ms;  /* of the handshake; 0 = 5000 */
  int32_t spin_us;      /* how long a wait looks before it sleeps; -1 = 20 + 0.1 a row, at most 500; 0 = not at all */
  const char* client_name; /* for the daemon's log; NULL = the program's name */
  uint32_t flags;          /* ENGRAM_CONNECT_* */
  uint32_t reserved;
} engram_connect_options;

/* One layer of one table, as its catalogue record says. */
typedef struct engram_layer {
  uint32_t handle;
  uint32_t row_bytes;
  uint32_t value_bytes;
  uint32_t reserved;
  uint64_t rows;
} engram_layer;

typedef struct engram_session_usage {
  uint32_t open_tickets;
  uint32_t zombie_tickets; /* released before their completion came */
  uint64_t arena_bytes;    /* held by both */
  uint64_t ids_bytes;
} engram_session_usage;

/* What a session has done so far. A request that was split counts once; one refused or failed has no rows. */
typedef struct engram_session_totals {
  uint64_t requests;
  uint64_t failed_requests; /* answered with an error */
  uint64_t rows;            /* received */
  uint64_t reply_bytes;
  uint64_t wait_ns; /* of all threads, in waits that did not find their reply ready */
  uint64_t copy_ns; /* out of the arena, in engram_fetch_run */
} engram_session_totals;

/* The session's mappings, for registration with a device. Valid until free and the release of the last ticket. */
typedef struct engram_session_memory {
  void* ring;
  const void* arena;
  uint64_t ring_bytes;
  uint64_t arena_bytes;
  uint32_t arena_is_writable; /* as engram_connect_options asked for */
  uint32_t reserved;
} engram_session_memory;

/* A slot that a GPU stream uses by itself, with fixed places for ids and rows (docs/protocol.md, GPU streams). */
typedef struct engram_lane {
  uint32_t slot;
  uint32_t row_count;
  uint32_t id_bytes;
  uint32_t layout;
  /* From the ring's start: */
  uint64_t ids_offset;
  uint64_t reply_line_offset; /* engram_reply, then the wait line, then the stream line: 192 bytes */
  uint64_t completion_offset;
  uint64_t doorbell_offset;
  /* From the arena's start: */
  uint64_t rows_offset;
  uint64_t rows_bytes;
} engram_lane;

/* A fetch in progress. Zero the struct, then set the first part. */
typedef struct engram_fetch {
  const engram_layer* layer;
  const void* ids; /* row_count x id_bytes; must stay unchanged until the fetch is over */
  void* rows;      /* packed: row_count x row_bytes; split: row_count x value_bytes; prefetch: unused */
  void* scales;    /* split: row_count x (row_bytes - value_bytes) */
  uint64_t row_count;
  uint32_t id_bytes;  /* 4 or 8 */
  uint16_t layout;    /* ENGRAM_LAYOUT_* */
  uint16_t operation; /* ENGRAM_OPERATION_* */
  /* from here on the client's own */
  uint64_t request_id;
  uint64_t part_rows;
  uint32_t part_count;
  uint32_t parts_submitted;
  uint32_t parts_done;
  uint32_t started;
  int64_t tickets[3];
} engram_fetch;

/* Opens a session with the daemon whose socket is `path` (the ring socket beside it, PATH.ring, is used). NULL on
 * error: ENGRAM_STATUS_LOST where nobody answers. options may be NULL. */
engram_session* engram_connect(const char* path, const engram_connect_options* options, engram_error* error);
/* Hangs up: calls in flight and later ones end with ENGRAM_CLIENT_CLOSED. Rows of unreleased tickets stay readable. */
void engram_session_close(engram_session* session);
/* Hangs up, and unmaps everything once the last ticket is released. NULL is allowed. */
void engram_session_free(engram_session* session);
/* Keeps the session's memory mapped, and the session usable for closing lanes, until as many drops: for those who must
 * unregister that memory from a device before it goes, in whatever order things end. */
void engram_session_retain(engram_session* session);
void engram_session_drop(engram_session* session);
/* 0 while the session serves; else ENGRAM_STATUS_LOST or ENGRAM_CLIENT_CLOSED. */
int engram_session_check(engram_session* session, engram_error* error);
/* What the daemon said at the handshake. Valid until free. */
const engram_welcome* engram_session_welcome(const engram_session* session);
void engram_session_read_usage(engram_session* session, engram_session_usage* usage);
void engram_session_read_totals(engram_session* session, engram_session_totals* totals);
void engram_session_read_memory(const engram_session* session, engram_session_memory* memory);

/* Copies up to `capacity` records of the catalogue; returns how many there are. */
uint32_t engram_session_layers(engram_session* session, engram_catalogue_record* records, uint32_t capacity);
/* Copies up to `capacity` head sizes of a layer; returns how many there are, or -1 where no layer has the handle. */
int64_t engram_session_head_sizes(engram_session* session, uint32_t handle, int64_t* sizes, uint32_t capacity);
/* The layer of a table, as the catalogue has it. `identity` (64 hexadecimal digits) pins the content; NULL takes any.
 * ENGRAM_STATUS_UNKNOWN_TABLE where there is none, ENGRAM_CLIENT_ARGUMENT where the identity is another. */
int engram_find_layer(engram_session* session, const char* name, uint32_t layer, const char* identity,
                      engram_layer* found, engram_error* error);
/* Asks the daemon for the catalogue as it is now: after ENGRAM_STATUS_STALE. */
int engram_session_refresh(engram_session* session, engram_error* error);
/* Asks for the memory of a layer that the daemon holds resident: 0 and a descriptor for the caller to map read-only and
 * close, with what lies where in *map; else the status (ENGRAM_STATUS_STALE after a reload, _BUSY where it cannot be
 * now) and the daemon's reason. */
int engram_session_map(engram_session* session, uint32_t handle, engram_map* map, int* descriptor, engram_error* error);
/* Tells the daemon that such a mapping is gone. The session's end does so too. */
int engram_session_unmap(engram_session* session, uint32_t handle, engram_error* error);
/* Most rows of one ticket where a row has row_bytes. */
uint64_t engram_session_ticket_rows(const engram_session* session, uint32_t row_bytes);

/* Copies the ids and sends one request. Returns a ticket (0 or more), or -status. wait_ms: how long to wait for a free
 * slot and room in the arena (-1 = without limit, then ENGRAM_STATUS_TIMEOUT; 0 = ENGRAM_STATUS_BUSY at once). BUSY
 * also where waiting is hopeless: all tickets are held by threads that wait for room themselves. */
int64_t engram_submit(engram_session* session, const engram_layer* layer, const void* ids, uint32_t id_bytes,
                      uint64_t row_count, uint32_t layout, int32_t wait_ms, engram_error* error);
/* The ticket's rows (read-only; valid until its release), or NULL. timeout_ms -1 = no limit. After
 * ENGRAM_STATUS_TIMEOUT and ENGRAM_CLIENT_AGAIN it can be called again. */
const void* engram_wait(engram_session* session, int64_t ticket, int32_t timeout_ms, engram_error* error);
/* Sends the ticket's request once more, to `layer`, which has the same row_bytes: after ENGRAM_STATUS_STALE. */
int engram_resubmit(engram_session* session, int64_t ticket, const engram_layer* layer, engram_error* error);
/* Gives the ticket's room back, at once or when its completion comes. Releasing twice is harmless. */
void engram_release(engram_session* session, int64_t ticket);

/* Prepares a lane for batches of row_count rows; the session must have been made with ENGRAM_CONNECT_STREAM_SLOTS. From
 * now on a watchdog thread of this library releases the lane's completion word with ENGRAM_STATUS_LOST when the daemon
 * is gone, or when a use takes longer than deadline_ms: the lane's stream_lost then says so for good, no row of it is
 * valid any more, and only a new session has sound lanes again. */
int engram_lane_open(engram_session* session, const engram_layer* layer, uint32_t row_count, uint32_t id_bytes,
                     uint32_t layout, uint32_t deadline_ms, engram_lane* lane, engram_error* error);
/* The stream must have finished with the lane. */
void engram_lane_close(engram_session* session, const engram_lane* lane);

/* Runs a fetch (or a prefetch) to its end. After ENGRAM_STATUS_TIMEOUT and ENGRAM_CLIENT_AGAIN the same call goes on
 * with it, or engram_fetch_cancel gives it up. Other errors end it; `rows` then holds nothing of use. */
int engram_fetch_run(engram_session* session, engram_fetch* fetch, int32_t timeout_ms, engram_error* error);
void engram_fetch_cancel(engram_session* session, engram_fetch* fetch);
/* Index of the first id outside -1 .. rows - 1, or -1 where all are good. */
int64_t engram_find_bad_id(const void* ids, uint32_t id_bytes, uint64_t count, uint64_t rows);
/* cdef-end */
#ifdef __cplusplus
}
#endif
