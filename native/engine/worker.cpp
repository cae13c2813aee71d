#include "engine/worker.h"

#include <pthread.h>

#include <algorithm>
#include <csignal>
#include <exception>
#include <utility>

#include "common/masked_thread.h"
#include "io/fault_reader.h"
#include "ring/futex.h"

namespace engram {
namespace {

constexpr std::int64_t kSmallMemoryNs = 10'000'000;  // a small batch is looked out for this long after the last one

}  // namespace

Worker::Worker(EngineShared& shared, const WorkerOptions& options)
    : shared_(shared), options_(options), stream_poll_(options.poll_permille), zero_row_(ENGRAM_MAX_ROW_BYTES) {
  // Some places are kept for small batches. The limit of prefetches changes with demand.
  const std::uint32_t cap = options.in_flight_cap;
  small_pages_.in_flight_limit = cap;
  large_pages_.in_flight_limit = std::max(1u, cap - cap / 8);
}

Worker::~Worker() {
  stop();
}

bool Worker::start(std::string& error) {
  std::atomic<int> started{0};
  thread_ = masked_thread([this, &error, &started] { run(&error, &started); });
  started.wait(0);
  if (started.load() > 0) return true;
  thread_.join();
  return false;
}

void Worker::stop() {
  if (!thread_.joinable()) return;
  stop_.store(true, std::memory_order_seq_cst);
  {
    const std::lock_guard lock(reader_mutex_);
    if (reader_ != nullptr) reader_->wake();
  }
  thread_.join();
}

void Worker::post(Mail mail) {
  {
    const std::lock_guard lock(mail_mutex_);
    mail_.push_back(std::move(mail));
    has_mail_.store(true, std::memory_order_seq_cst);
  }
  const std::lock_guard lock(reader_mutex_);
  if (reader_ != nullptr) reader_->wake();
}

void Worker::add_session(std::unique_ptr<RingSession> session) {
  post({std::move(session), 0, nullptr, nullptr});
}
void Worker::close_session(std::uint64_t session) {
  post({nullptr, session, nullptr, nullptr});
}
void Worker::add_local(std::shared_ptr<LocalRequest> request) {
  post({nullptr, 0, std::move(request), nullptr});
}

void Worker::wake_if_asleep() {
  if (!asleep_.load(std::memory_order_seq_cst)) return;
  const std::lock_guard lock(reader_mutex_);
  if (reader_ != nullptr) reader_->wake();
}

bool Worker::open_reader(std::string& error) {
  const std::uint32_t buffer_count = options_.in_flight_cap + options_.in_flight_cap / 2;
  buffers_ = std::make_unique<PageBuffers>(buffer_count, options_.page_bytes);
  if (!buffers_->valid()) {
    error = "no memory for " + std::to_string(buffer_count) + " page buffers";
    return false;
  }
  flights_.resize(buffer_count);
  for (std::uint32_t buffer = buffer_count; buffer-- > 0;) free_buffers_.push_back(buffer);
  std::unique_ptr<PageReader> reader;
  std::string reason;
  if (options_.reader != ENGRAM_READER_PREAD) reader = make_uring_reader(options_.in_flight_cap, *buffers_, reason);
  if (reader == nullptr && options_.reader == ENGRAM_READER_IO_URING) {
    error = "io_uring was asked for and is not to be had: " + reason;
    return false;
  }
  if (reader == nullptr) {
    if (options_.reader == ENGRAM_READER_AUTO && options_.index == 0) {
      engram_event event{};
      event.kind = ENGRAM_EVENT_READER;
      const std::string text = "io_uring is not to be had (" + reason + "); pages are read by a pool of pread threads";
      std::copy_n(text.data(), std::min(text.size(), sizeof event.text - 1), event.text);
      shared_.events.push(event);
    }
    reader = make_pread_reader(options_.in_flight_cap, *buffers_, error);
    if (reader == nullptr) return false;
  }
  io_uring_.store(reader->is_io_uring(), std::memory_order_relaxed);
  reader = with_faults(std::move(reader), *buffers_);
  const std::lock_guard lock(reader_mutex_);
  reader_ = std::move(reader);
  return true;
}

void Worker::run(std::string* error, std::atomic<int>* started) {
  const bool ready = open_reader(*error);
  // `error` and `started` live only until this is seen.
  started->store(ready ? 1 : -1);
  started->notify_one();
  if (!ready) return;

  std::int64_t spin_end = 0;
  std::uint32_t idle_turns = 0;
  while (!stop_.load(std::memory_order_relaxed)) {
    bool worked = has_mail_.load(std::memory_order_relaxed) && take_mail();
    worked |= take_requests();
    // The drive first: it must not idle while rows are looked up whose pages come later.
    if (!reads_due_) worked |= look_up_next_large();
    worked |= submit_reads();
    worked |= reap_reads();
    if (!worked) worked = count_distinct_step();
    if (worked) {
      idle_turns = 0;
      spin_end = 0;
      continue;
    }
    // With reads on their way the ring is the place to wait: nothing completes unless the owner enters it.
    if (in_flight_.load(std::memory_order_relaxed) == 0) {
      spin_pause();
      if (++idle_turns % 16 != 0) continue;
      const std::int64_t now = monotonic_ns();
      if (spin_end == 0) spin_end = now + std::int64_t{options_.spin_us} * 1000;
      if (now < spin_end) {
        sched_yield();  // the client may share this CPU
        continue;
      }
    }
    sleep();
    spin_end = 0;
  }

  // Reads land in memory that is about to go: wait for them.
  while (in_flight_.load(std::memory_order_relaxed) > 0) {
    reader_->flush();
    if (!reap_reads()) reader_->wait(1, -1);
  }
  const std::lock_guard lock(reader_mutex_);
  reader_.reset();
}

bool Worker::anything_submitted() const {
  return std::any_of(sessions_.begin(), sessions_.end(), [](const auto& session) {
    // A session that holds all the ids it may goes on with its own completions, not with its tail.
    return !session->closing && ((!session->held_back && session->submitted(session->tail()) != 0) ||
                                 (session->armed_until_ns != 0 && session->has_stream_doorbell()));
  });
}

bool Worker::has_armed_session() const {
  const bool has_streams =
      std::any_of(sessions_.begin(), sessions_.end(), [](const auto& session) { return session->armed_until_ns != 0; });
  if (!has_streams) return false;
  const std::int64_t now = monotonic_ns();
  return std::any_of(sessions_.begin(), sessions_.end(),
                     [now](const auto& session) { return !session->closing && session->armed_until_ns > now; });
}

void Worker::sleep() {
  const std::uint32_t in_flight = in_flight_.load(std::memory_order_relaxed);
  const bool polls = has_armed_session();
  do {
    asleep_.store(true, std::memory_order_seq_cst);
    shared_.state->set_asleep(options_.index, true);
    // The flag is up before the last look at the tails and the mail: whoever comes later rings.
    if (shared_.shared_batches.load(std::memory_order_seq_cst) != 0 || has_mail_.load(std::memory_order_seq_cst) ||
        stop_.load(std::memory_order_seq_cst) || anything_submitted()) {
      break;
    }
    // While a small batch waits, every completion may be its last; and a doorbell ends a wait for one completion only.
    const bool expects_small = small_open_ > 0 || monotonic_ns() - last_small_ns_ < kSmallMemoryNs;
    const std::uint32_t several = expects_small || polls ? 1 : std::clamp(in_flight / 8, 1u, 8u);
    const std::int64_t at_most_ns = polls ? stream_poll_.begin_sleep() : -1;
    if (at_most_ns == 0) {
      sched_yield();
    } else {
      reader_->wait(in_flight == 0 ? 0 : several, at_most_ns);
    }
    if (polls) stream_poll_.end_sleep();
    // A stream cannot ring the eventfd: with armed sessions an idle worker wakes to look, and does nothing else for it.
  } while (polls && in_flight == 0 && !reap_reads() && has_armed_session());
  shared_.state->set_asleep(options_.index, false);
  asleep_.store(false, std::memory_order_seq_cst);
}

bool Worker::take_mail() {
  std::vector<Mail> mail;
  {
    const std::lock_guard lock(mail_mutex_);
    mail.swap(mail_);
    has_mail_.store(false, std::memory_order_seq_cst);
  }
  for (Mail& letter : mail) {
    if (letter.opened != nullptr) {
      reader_->watch(letter.opened->doorbell());
      sessions_.push_back(std::move(letter.opened));
    } else if (letter.local != nullptr) {
      begin_local_request(letter.local);
    } else if (letter.settled != nullptr) {
      while (count_distinct_step()) {
      }
      letter.settled->set_value();
    } else {
      for (auto& session : sessions_) {
        if (session->id != letter.closed || session->closing) continue;
        session->closing = true;
        reader_->unwatch(session->doorbell());
      }
      retire_closed_sessions();
    }
  }
  return !mail.empty();
}

void Worker::retire_closed_sessions() {
  for (auto session = sessions_.begin(); session != sessions_.end();) {
    if ((*session)->closing && (*session)->in_flight() == 0) {
      shared_.state->bury(std::move(*session));
      session = sessions_.erase(session);
    } else {
      ++session;
    }
  }
}

}  // namespace engram
