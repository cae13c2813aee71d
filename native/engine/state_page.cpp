#include "engine/state_page.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstddef>
#include <cstring>

#include "common/masked_thread.h"
#include "engine/ring_session.h"

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

namespace engram {
namespace {

constexpr std::uint64_t kStateBytes = 4096;

struct RobustList {
  robust_list_head head;
  robust_list entry;
};

// For the handler of fatal signals: a crashing daemon says so before a core dump can delay the end of its threads.
std::atomic<engram_state*> crashing_state{nullptr};

void on_fatal_signal(int) {
  engram_state* state = crashing_state.load(std::memory_order_relaxed);
  if (state != nullptr) std::atomic_ref(state->phase).store(ENGRAM_PHASE_DEAD, std::memory_order_seq_cst);
  // SA_RESETHAND has restored the default: the fault happens again on return. A signal that was sent does not.
}

void install_fatal_handlers() {
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  struct sigaction action {};
  action.sa_handler = on_fatal_signal;
  action.sa_flags = static_cast<int>(SA_RESETHAND | SA_NODEFER);
  for (const int signal : {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT}) {
    struct sigaction current {};
    if (sigaction(signal, nullptr, &current) == 0 && current.sa_handler == SIG_DFL) {
      sigaction(signal, &action, nullptr);
    }
  }
#else
  static_cast<void>(&on_fatal_signal);
#endif
}

}  // namespace

std::unique_ptr<StatePage> StatePage::create(std::string& error) {
  std::unique_ptr<StatePage> state(new StatePage);
  const auto fail = [&](const char* what) {
    error = std::string("state page: ") + what + ": " + std::strerror(errno);
    return nullptr;
  };
  state->descriptor_.reset(memfd_create("engram-state", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!state->descriptor_ || ftruncate(state->descriptor_.get(), kStateBytes) != 0) return fail("memfd_create");
  state->state_ =
      Mapping::map(state->descriptor_.get(), kStateBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE);
  state->robust_list_ =
      Mapping::map(-1, kStateBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE);
  if (!state->state_ || !state->robust_list_) return fail("mmap");
  constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL;
  if (fcntl(state->descriptor_.get(), F_ADD_SEALS, kSeals) != 0) return fail("seals");
  madvise(state->state_.data(), kStateBytes, MADV_DONTFORK);
  engram_state* page = state->page();
  page->magic = ENGRAM_STATE_MAGIC;
  page->version = ENGRAM_PROTOCOL_VERSION;
  page->pid = getpid();
  page->phase = ENGRAM_PHASE_SERVING;

  StatePage* raw = state.get();
  raw->keeper_ = masked_thread([raw] { raw->keep(); });
  std::unique_lock lock(raw->mutex_);
  raw->changed_.wait(lock, [raw] { return raw->held_; });
  crashing_state.store(page, std::memory_order_relaxed);
  install_fatal_handlers();
  return state;
}

StatePage::~StatePage() {
  engram_state* expected = page();
  crashing_state.compare_exchange_strong(expected, nullptr);
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (keeper_.joinable()) keeper_.join();
}

void StatePage::bury(std::function<void()> work) {
  {
    const std::lock_guard lock(mutex_);
    buried_.push_back(std::move(work));
  }
  changed_.notify_all();
}

void StatePage::bury(std::unique_ptr<RingSession> session) {
  bury([owned = session.release()] { delete owned; });
}

void StatePage::keep() {
  auto* list = reinterpret_cast<RobustList*>(robust_list_.data());
  list->entry.next = &list->head.list;
  list->head.list.next = &list->entry;
  // The kernel finds the futex at this distance from the entry; the two may lie in different mappings.
  list->head.futex_offset = reinterpret_cast<char*>(&page()->owner) - reinterpret_cast<char*>(&list->entry);
  list->head.list_op_pending = nullptr;
  std::atomic_ref(page()->owner).store(static_cast<std::uint32_t>(gettid()), std::memory_order_seq_cst);
  syscall(SYS_set_robust_list, &list->head, sizeof list->head);

  std::unique_lock lock(mutex_);
  held_ = true;
  changed_.notify_all();
  while (true) {
    changed_.wait(lock, [this] { return stopping_ || !buried_.empty(); });
    std::vector<std::function<void()>> dead;
    dead.swap(buried_);
    lock.unlock();
    for (const auto& work : dead) work();
    lock.lock();
    if (stopping_ && buried_.empty()) return;
  }
}

}  // namespace engram
