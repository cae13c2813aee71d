/* The layouts that the daemon and its clients share: handshake messages, catalogue, ring, slots, state page.
 * docs/protocol.md says what the fields mean and who may write them when. Plain C; every struct is a fixed layout. */
#pragma once
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif
/* cdef-begin */
#define ENGRAM_PROTOCOL_VERSION 1
#define ENGRAM_MESSAGE_MAGIC 0x4D474E45   /* "ENGM" */
#define ENGRAM_CATALOGUE_MAGIC 0x43474E45 /* "ENGC" */
#define ENGRAM_RING_MAGIC 0x52474E45      /* "ENGR" */
#define ENGRAM_STATE_MAGIC 0x53474E45     /* "ENGS" */
#define ENGRAM_MESSAGE_MAX_BYTES 4096
#define ENGRAM_MAX_WORKERS 64
#define ENGRAM_MAX_SLOTS 256
#define ENGRAM_SLOT_BYTES 256

#define ENGRAM_STATUS_EMPTY 0
#define ENGRAM_STATUS_OK 1
#define ENGRAM_STATUS_ROW_ID 2
#define ENGRAM_STATUS_UNKNOWN_TABLE 3
#define ENGRAM_STATUS_STALE 4
#define ENGRAM_STATUS_BUSY 5
#define ENGRAM_STATUS_TIMEOUT 6
#define ENGRAM_STATUS_PAGE_CORRUPT 7
#define ENGRAM_STATUS_READ_FAILED 8
#define ENGRAM_STATUS_BAD_REQUEST 9
#define ENGRAM_STATUS_STOPPING 10
#define ENGRAM_STATUS_LOST 11

#define ENGRAM_OPERATION_FETCH 1
#define ENGRAM_OPERATION_PREFETCH 2
#define ENGRAM_OPERATION_ARM_STREAMS 3
#define ENGRAM_REQUEST_PROGRESS 1u /* in flags: rows_ready is wanted */
#define ENGRAM_LAYOUT_PACKED 0
#define ENGRAM_LAYOUT_SPLIT 1

#define ENGRAM_PHASE_SERVING 1
#define ENGRAM_PHASE_STOPPING 2
#define ENGRAM_PHASE_DEAD 3
#define ENGRAM_OWNER_DIED 0x40000000

/* In a hello's message.flags. */
#define ENGRAM_HELLO_STREAM_SLOTS 1
#define ENGRAM_HELLO_WRITABLE_ARENA 2

/* Values of stream_lost. */
#define ENGRAM_STREAM_DEADLINE 1
#define ENGRAM_STREAM_DAEMON_LOST 2

#define ENGRAM_KIND_HELLO 1
#define ENGRAM_KIND_WELCOME 2
#define ENGRAM_KIND_REFUSED 3
#define ENGRAM_KIND_CATALOGUE_REQUEST 4
#define ENGRAM_KIND_CATALOGUE 5
#define ENGRAM_KIND_MAPPED 6
#define ENGRAM_KIND_MAP_REQUEST 7
#define ENGRAM_KIND_MAP 8
#define ENGRAM_KIND_UNMAP 9
/* Places of the descriptors that come with a welcome. */
#define ENGRAM_FD_RING 0
#define ENGRAM_FD_ARENA 1
#define ENGRAM_FD_STATE 2
#define ENGRAM_FD_DOORBELL 3
#define ENGRAM_FD_CATALOGUE 4
#define ENGRAM_FD_COUNT 5

typedef struct engram_message {
  uint32_t magic;
  uint16_t version; /* of the message layout: ENGRAM_PROTOCOL_VERSION */
  uint16_t kind;    /* ENGRAM_KIND_* */
  uint32_t bytes;   /* of the whole message */
  uint32_t flags;   /* of a hello: ENGRAM_HELLO_*; else 0 */
} engram_message;

typedef struct engram_hello {
  engram_message message;
  uint32_t version_min;
  uint32_t version_max;
  uint64_t arena_bytes; /* wanted; 0 = the daemon's choice */
  char client_name[64]; /* UTF-8, zero-terminated */
} engram_hello;

typedef struct engram_ring_geometry {
  uint64_t ring_bytes;
  uint64_t arena_bytes;
  uint64_t submit_offset; /* of engram_submit_block in the ring */
  uint64_t slots_offset;
  uint64_t ids_offset; /* of the ids area in the ring */
  uint64_t ids_bytes;
  uint64_t max_reply_bytes; /* of one request */
  uint32_t slot_count;
  uint32_t stream_slot_count;
} engram_ring_geometry;

typedef struct engram_welcome {
  engram_message message;
  uint32_t version; /* chosen */
  uint32_t worker;  /* index into worker_asleep */
  uint64_t session;
  int64_t daemon_pid;
  engram_ring_geometry geometry;
  uint64_t state_bytes;
  uint64_t catalogue_bytes;
} engram_welcome;

typedef struct engram_refused {
  engram_message message;
  uint32_t status;
  uint32_t reserved;
  char text[512];
} engram_refused;

typedef struct engram_catalogue_message {
  engram_message message;
  uint64_t catalogue_bytes;
} engram_catalogue_message;

/* Asks for the memory of a resident layer (MAP_REQUEST), or gives it back (UNMAP). */
typedef struct engram_map_request {
  engram_message message;
  uint32_t handle;
  uint32_t reserved;
} engram_map_request;

/* The answer to MAP_REQUEST: with one descriptor where status is OK, else with a sentence. */
typedef struct engram_map {
  engram_message message;
  uint32_t status;
  uint32_t handle;
  uint64_t rows;
  uint32_t row_bytes;
  uint32_t value_bytes;
  uint64_t scales_offset; /* split only */
  uint64_t bytes;         /* to be mapped, from the file's beginning on */
  uint32_t row_layout;    /* ENGRAM_LAYOUT_* */
  uint32_t reserved;
  char text[448];
} engram_map;

typedef struct engram_catalogue {
  uint32_t magic;
  uint32_t version;
  uint64_t epoch; /* grows with each change */
  uint64_t bytes;
  uint32_t record_count;
  uint32_t record_bytes;
} engram_catalogue;

typedef struct engram_catalogue_record {
  char name[128]; /* UTF-8, zero-terminated */
  uint8_t identity[32];
  uint8_t table_id[16];
  uint64_t generation;
  uint64_t rows;
  uint32_t handle;
  uint32_t layer;
  uint32_t row_bytes;
  uint32_t value_bytes;       /* the rest of a row is its scale part */
  uint64_t head_sizes_offset; /* from the catalogue's start; int64 each */
  uint32_t head_count;
  uint32_t reserved;
} engram_catalogue_record;

/* At the start of the ring, written once by the daemon. */
typedef struct engram_ring_header {
  uint32_t magic;
  uint32_t version;
  uint64_t session;
  engram_ring_geometry geometry;
} engram_ring_header;

/* Followed by uint32_t submit_ring[slot_count]. */
typedef struct engram_submit_block {
  uint32_t submit_tail;
  uint32_t reserved[15];
} engram_submit_block;

/* First line of a slot: written by the client before submission. */
typedef struct engram_request {
  uint32_t operation; /* ENGRAM_OPERATION_* */
  uint32_t handle;
  uint32_t row_count;
  uint16_t id_bytes;     /* 4 or 8 */
  uint16_t layout;       /* ENGRAM_LAYOUT_* */
  uint64_t ids_offset;   /* in the ids area, multiple of 8 */
  uint64_t reply_offset; /* in the arena, multiple of 64 */
  uint64_t request_id;   /* equal for the parts of a split request */
  uint32_t part_index;
  uint32_t part_count; /* 1 for a whole request */
  uint64_t total_rows; /* of all parts */
  uint32_t flags;      /* ENGRAM_REQUEST_* */
  uint32_t reserved;   /* 0 */
} engram_request;

/* Second line: written by the daemon; `completion` last. */
typedef struct engram_reply {
  uint32_t completion; /* ENGRAM_STATUS_*; a futex */
  int32_t error_number;
  uint64_t position; /* flat index of the row in the request */
  int64_t row_id;
  uint64_t page;
  uint32_t hits;
  uint32_t misses;
  union {
    uint64_t rows_ready; /* of other slots, where asked for: the reply's first rows that are there already */
    /* Of a stream slot, since the session began: uses taken, completed, and completed with another status than OK. */
    uint64_t stream_taken;
  };
  uint64_t stream_completed;
  uint64_t stream_failed;
} engram_reply;

typedef struct engram_slot {
  engram_request request;
  engram_reply reply;
  uint32_t waiting; /* third line: client */
  uint32_t waiting_reserved[15];
  uint32_t doorbell;    /* fourth line: GPU stream sets, daemon resets */
  uint32_t stream_lost; /* a latch, set by the client's watchdog: ENGRAM_STREAM_* */
  uint32_t doorbell_reserved[14];
} engram_slot;

/* The state page: only the daemon writes it; every client maps it read-only. */
typedef struct engram_state {
  uint32_t magic;
  uint32_t version;
  int64_t pid;
  uint64_t reserved_link;
  uint32_t owner; /* robust futex: thread id, ENGRAM_OWNER_DIED once that thread is gone */
  uint32_t phase; /* ENGRAM_PHASE_* */
  uint32_t reserved[8];
  uint32_t worker_asleep[64]; /* stride: one cache line each is not needed, workers rarely change it */
} engram_state;
/* cdef-end */
#ifdef __cplusplus
}
static_assert(sizeof(engram_request) == 64 && sizeof(engram_reply) == 64 && sizeof(engram_slot) == ENGRAM_SLOT_BYTES);
static_assert(sizeof(engram_submit_block) == 64 && sizeof(engram_ring_header) <= 4096 && sizeof(engram_state) <= 4096);
#endif
