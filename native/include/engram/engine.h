/* The engine behind the daemon: layers of packed tables in DRAM and on NVMe, worker threads, ring sessions, counters.
 *
 * Threads: every function may be called from any thread, except that create, add_layers, start and destroy of one
 * engine must not overlap one another; after start, adding, retiring and placing are safe. Functions that wait say so;
 * cffi releases the GIL around all of them. Errors: a function that returns int gives 0, or an ENGRAM_STATUS_* / -1
 * with a sentence in `error` (zero-terminated).
 */
#pragma once
#include <stdint.h>

#include "engram/wire.h"
#ifdef __cplusplus
extern "C" {
#endif
/* cdef-begin */
#define ENGRAM_READER_AUTO 0
#define ENGRAM_READER_IO_URING 1
#define ENGRAM_READER_PREAD 2

#define ENGRAM_TIER_CACHED 0
#define ENGRAM_TIER_LOADING 1
#define ENGRAM_TIER_RESIDENT 2

#define ENGRAM_POLICY_AUTO 0     /* resident where the budget covers the rows of all layers, else cached */
#define ENGRAM_POLICY_RESIDENT 1 /* refused where the budget does not cover it */
#define ENGRAM_POLICY_CACHED 2

#define ENGRAM_LATENCY_CLASSES 4 /* requests of 1-256, 257-4096, 4097-65536, 65537- rows */
#define ENGRAM_STATUS_COUNT 12

#define ENGRAM_EVENT_VIOLATION 1 /* a session broke the protocol; the daemon should close it */
#define ENGRAM_EVENT_PAGE 2      /* a page could not be served: status, handle, page, row_id, error_number */
#define ENGRAM_EVENT_RESIDENT                                                                 \
  3 /* a layer became resident: handle; row_id = bad pages left to NVMe; text: of memory kept \
       by an earlier process, "taken over" or why not */
#define ENGRAM_EVENT_READER 4 /* what the reader is and why: text */

typedef struct engram_engine engram_engine;

typedef struct engram_engine_options {
  uint64_t dram_bytes;        /* budget: rows, index, queues, ghosts; 0 = no row cache */
  uint64_t arena_bytes;       /* of a session */
  uint64_t arena_limit_bytes; /* of all sessions' arenas and rings together */
  uint32_t session_limit;
  uint32_t slot_count;    /* of a session's ring; power of two, <= ENGRAM_MAX_SLOTS */
  uint32_t workers;       /* 0 = choose */
  uint32_t in_flight_cap; /* reads in flight per worker; 0 = choose */
  uint32_t reader;        /* ENGRAM_READER_* */
  uint32_t spin_us;       /* how long a worker looks for work before it sleeps; 0 = choose */
  uint32_t poll_permille; /* of one CPU, that a worker may spend looking at idle stream doorbells; 0 = choose */
  uint32_t prefetch_rows; /* that a session may have queued for prefetch in a worker; 0 = choose */
} engram_engine_options;

typedef struct engram_layer_policy {
  uint32_t tier;        /* ENGRAM_POLICY_*: which tier the layer is to have, whatever it has now */
  uint32_t cache_group; /* cached layers of one group and row size share a cache; 0 = the common one */
  uint32_t row_layout;  /* ENGRAM_LAYOUT_*: how a resident layer's rows lie in memory */
  uint32_t reserved;
  double cache_share; /* 0 .. 1 of the budget, for the cache of a group other than 0 (the same in all its layers) */
} engram_layer_policy;

typedef struct engram_layer_options {
  uint8_t table_id[16];
  uint64_t generation;
  uint64_t rows;
  uint32_t layer;
  uint32_t row_bytes;
  uint32_t value_bytes;
  uint32_t stripe_pages;
  uint32_t file_count;
  engram_layer_policy policy;
  const int* kept_memory; /* NULL, or a descriptor of an earlier process's resident rows: taken over where they are
                             these rows in this layout, each page once its digest is right. The engine duplicates it */
  const int*
      files; /* descriptors opened for reading, O_DIRECT where the filesystem has it; the engine duplicates them */
} engram_layer_options;

/* Resident rows as they lie in a memfd that nobody else can write. Row r of a packed layout is at r * row_bytes; of a
 * split one its values are at r * value_bytes, its scales at scales_offset + r * (row_bytes - value_bytes). */
typedef struct engram_resident_memory {
  int descriptor;
  uint32_t row_layout; /* ENGRAM_LAYOUT_* */
  uint64_t rows;
  uint32_t row_bytes;
  uint32_t value_bytes;
  uint64_t scales_offset; /* split only */
  uint64_t bytes;         /* to be mapped, from the file's beginning on */
} engram_resident_memory;

typedef struct engram_session_descriptors {
  int ring; /* the caller sends and closes these three */
  int arena;
  int doorbell;
} engram_session_descriptors;

typedef struct engram_failure {
  uint32_t status; /* ENGRAM_STATUS_* */
  int32_t error_number;
  uint64_t position;
  int64_t row_id;
  uint64_t page;
} engram_failure;

/* The end of a request that was submitted. */
typedef struct engram_completion {
  uint64_t tag;
  uint8_t* rows; /* of a fetch that succeeded: row_count x row_bytes, the taker's, for engram_rows_free; else NULL */
  uint64_t bytes;
  engram_failure failure; /* status OK where it succeeded */
} engram_completion;

typedef struct engram_layer_counters {
  uint32_t handle;
  uint32_t tier;       /* ENGRAM_TIER_* */
  uint64_t dram_bytes; /* a resident layer's rows; else the budget of the cache that it shares */
  uint64_t maps;       /* clients' sessions that have its resident rows mapped */
  uint64_t rows_total;
  uint64_t requests;
  uint64_t rows;
  uint64_t rows_zero;
  uint64_t dram_hits;
  uint64_t dram_misses;
  uint64_t rows_failed;
  uint64_t rows_unique; /* distinct rows of each batch, summed over batches */
  uint64_t nvme_reads;
  uint64_t prefetch_reads;
  uint64_t background_reads;
  uint64_t rereads; /* pages read a second time because a row's checksum failed; in nvme_reads and prefetch_reads too */
  uint64_t errors[12]; /* requests, by ENGRAM_STATUS_* */
} engram_layer_counters;

typedef struct engram_latency {
  uint64_t count;
  double p50_us;
  double p99_us;
  double p999_us;
} engram_latency;

typedef struct engram_latency_bucket {
  uint64_t end_ns; /* first latency above the bucket; the one below it ends at most 1/16 earlier */
  uint64_t count;
} engram_latency_bucket;

typedef struct engram_engine_counters {
  uint64_t budget_bytes;
  uint64_t used_bytes;     /* touched row slots, resident rows and metadata */
  uint64_t metadata_bytes; /* index, queues, ghosts */
  uint64_t hugetlb_bytes;  /* of used_bytes in MAP_HUGETLB memory (transparent huge pages: see smaps) */
  uint64_t rows_cached;
  uint64_t arena_count;
  uint64_t arena_bytes; /* arenas and rings */
  uint64_t arena_limit_bytes;
  uint32_t reader; /* ENGRAM_READER_* in use */
  uint32_t workers;
  uint32_t in_flight_cap; /* of all workers together */
  uint32_t in_flight;
  uint64_t prefetch_dropped_rows;
  uint64_t prefetch_queued_rows; /* waiting for the drive; more than a limit of a million a worker are dropped */
  engram_latency latency[4];
} engram_engine_counters;

typedef struct engram_session_counters {
  uint64_t session;
  int64_t pid;
  uint32_t uid;
  uint32_t waiting; /* requests taken and not completed */
  double since_s;   /* age */
  uint64_t requests;
  uint64_t rows;
} engram_session_counters;

typedef struct engram_event {
  uint32_t kind; /* ENGRAM_EVENT_* */
  uint32_t status;
  uint64_t session;
  uint32_t handle;
  int32_t error_number;
  uint64_t page;
  int64_t row_id;
  uint64_t request_id; /* of a bad page: the request that met it, as its session numbers it */
  char text[192];
} engram_event;

/* Checks the options and takes the address space; no thread runs yet. NULL on error. */
engram_engine* engram_engine_create(const engram_engine_options* options, char* error, uint64_t error_bytes);

/* Adds layers, all of them or none: checks each file's size and alignment needs (statx), and after start whether the
 * served layers but those that these are to replace could be placed with them under the budget in force. handles: one
 * for each layer, as in protocol.md; a refusal uses none up. Layers added after start are served from their files until
 * engram_engine_place has given them their share of DRAM. */
int engram_engine_add_layers(engram_engine* engine, const engram_layer_options* options, uint64_t count,
                             const uint32_t* replaced, uint64_t replaced_count, uint32_t* handles, char* error,
                             uint64_t error_bytes);

/* Starts the workers. From here on sessions can be opened. Rows are placed in DRAM as by engram_engine_place. */
int engram_engine_start(engram_engine* engine, char* error, uint64_t error_bytes);

/* Takes no new batches of the layer (they complete with STALE), waits until the running ones have ended (at most
 * timeout_ms; ENGRAM_STATUS_TIMEOUT: call again), then frees its memory and closes its files. */
int engram_engine_retire_layer(engram_engine* engine, uint32_t handle, uint32_t timeout_ms);
/* Changes what engram_engine_place is to do with a layer from its next call on. */
int engram_engine_set_policy(engram_engine* engine, uint32_t handle, const engram_layer_policy* policy);
/* Whether the layers that are served could be placed under this budget; changes nothing. */
int engram_engine_check_place(engram_engine* engine, uint64_t dram_bytes, char* error, uint64_t error_bytes);
/* Places the layers that are served in DRAM anew, by their policies: for a new budget, new policies, or after layers
 * have changed. Resident layers are loaded in the background. Refused, with nothing changed, where resident layers and
 * shares exceed the budget. Memory that is given up is freed before new memory is taken, so the budget is not exceeded;
 * resident layers that stay so keep their rows, and so do caches whose budget stays. Waits for running batches. */
int engram_engine_place(engram_engine* engine, uint64_t dram_bytes, char* error, uint64_t error_bytes);
/* A layer's resident rows, once every page of it has been checked, for one more client; the caller closes the
 * descriptor. Else -1 and a sentence. While a layer is mapped it stays resident (placements that would end that are
 * refused), and if it is retired its memory counts against the budget. Waits for nothing: while layers are being placed
 * it refuses. */
int engram_engine_map_layer(engram_engine* engine, uint32_t handle, engram_resident_memory* memory, char* error,
                            uint64_t error_bytes);
/* One client fewer has the layer mapped. Waits for nothing. */
int engram_engine_unmap_layer(engram_engine* engine, uint32_t handle);
/* Rows of a layer that the row cache holds, hottest first, in pieces: fills `rows` and moves *cursor (0 to begin);
 * returns how many, 0 at the end. Rows that move meanwhile may be missed or come twice. */
uint64_t engram_engine_hot_rows(engram_engine* engine, uint32_t handle, uint64_t* cursor, uint64_t* rows,
                                uint64_t capacity);
/* Reads rows into the row cache behind all demand; waits until they are there (at most timeout_ms). At most 65,536 rows
 * a call. They count as background reads. */
int engram_engine_warm(engram_engine* engine, uint32_t handle, const uint64_t* rows, uint32_t count,
                       uint32_t timeout_ms);

/* The state page's descriptor (owned by the engine; valid until destroy) and an eventfd that turns readable with
 * events. */
int engram_engine_state_descriptor(engram_engine* engine);
int engram_engine_event_descriptor(engram_engine* engine);
/* Takes one event; 1, or 0 where there is none. */
int engram_engine_next_event(engram_engine* engine, engram_event* event);

/* Makes a session's ring, arena and doorbell. arena_bytes 0 = the engine's; flags: ENGRAM_HELLO_*. welcome: session,
 * worker, geometry and state_bytes are filled in. ENGRAM_STATUS_BUSY where a limit is reached. */
int engram_engine_open_session(engram_engine* engine, int64_t pid, uint32_t uid, uint64_t arena_bytes, uint32_t flags,
                               engram_welcome* welcome, engram_session_descriptors* descriptors, char* error,
                               uint64_t error_bytes);
/* Once the client has mapped the ring: seals it and hands the session to its worker. */
int engram_engine_start_session(engram_engine* engine, uint64_t session, char* error, uint64_t error_bytes);
/* Returns at once; memory is freed when the session's reads have landed. Unknown sessions are ignored. */
void engram_engine_close_session(engram_engine* engine, uint64_t session);

/* A fetch or prefetch from private memory, for the control plane: copies the ids (row_count x id_bytes) and returns
 * without waiting for a drive. 0: it is taken; else an ENGRAM_STATUS_* or -1 (out of memory), and it is not. A small
 * fetch whose rows are all resident is served at once, on this thread: then *completion is its end, and no other comes.
 * Else completion->failure.status is 0 and the completion comes later, with this tag. operation: ENGRAM_OPERATION_*;
 * layout, part_count, total_rows and request_id as in engram_request, offsets unused. */
int engram_engine_submit(engram_engine* engine, const engram_request* request, const void* ids, uint64_t tag,
                         engram_completion* completion);
/* An eventfd that turns readable with completions (owned by the engine; valid until destroy): read it, then take
 * completions until there are none. */
int engram_engine_completion_descriptor(engram_engine* engine);
/* Takes one completion; 1, or 0 where there is none. */
int engram_engine_next_completion(engram_engine* engine, engram_completion* completion);
/* Any thread; NULL is ignored. The rows do not need their engine. */
void engram_rows_free(uint8_t* rows);

/* The DRAM budget in force. Waits for nothing; what follows may wait for a placement that is under way. */
uint64_t engram_engine_budget_bytes(const engram_engine* engine);

/* Counters; retired layers are left out. Arrays are filled up to capacity; the return value is the number there are. */
uint64_t engram_engine_layer_counters(engram_engine* engine, engram_layer_counters* counters, uint64_t capacity);
uint64_t engram_engine_session_counters(engram_engine* engine, engram_session_counters* counters, uint64_t capacity);
void engram_engine_read_counters(engram_engine* engine, engram_engine_counters* counters);
/* Latencies of a class (0 .. ENGRAM_LATENCY_CLASSES - 1) since the start, without its empty buckets: fills `buckets` up
 * to capacity, shortest first, and the sum of all latencies; returns how many there are. */
uint64_t engram_engine_latency_histogram(engram_engine* engine, uint32_t latency_class, engram_latency_bucket* buckets,
                                         uint64_t capacity, uint64_t* sum_ns);

/* In a build that can inject disk faults (for tests), "short=3 eintr=0 ...": the faults injected so far. Returns the
 * text's length, 0 in an ordinary build. */
uint64_t engram_fault_report(char* text, uint64_t text_bytes);

/* New requests complete with STOPPING from now on. Waits until running ones are done, at most timeout_ms; 0 when
 * drained. */
int engram_engine_drain(engram_engine* engine, uint32_t timeout_ms);
/* Stops the threads (reads in flight land first) and frees everything. */
void engram_engine_destroy(engram_engine* engine);
/* cdef-end */
#ifdef __cplusplus
}
#endif
