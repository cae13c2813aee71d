/* Fetches through the C client while every allocation of the process is counted: submit, wait and release make none.
 * no_allocation SOCKET TABLE LAYER BATCHES; prints the hash of a token too, so that the hash is linked. */
#include <engram_client.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);

static atomic_ulong allocations;

/* The program's own symbols come before libc's, for the shared library too. */
void* malloc(size_t bytes) {
  atomic_fetch_add(&allocations, 1);
  return __libc_malloc(bytes);
}
void* calloc(size_t count, size_t bytes) {
  atomic_fetch_add(&allocations, 1);
  return __libc_calloc(count, bytes);
}
void* realloc(void* memory, size_t bytes) {
  atomic_fetch_add(&allocations, 1);
  return __libc_realloc(memory, bytes);
}

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  engram_error error = {0};
  engram_session* session = engram_connect(argv[1], NULL, &error);
  engram_layer layer;
  if (session == NULL || engram_find_layer(session, argv[2], (uint32_t)atoi(argv[3]), NULL, &layer, &error) != 0) {
    fprintf(stderr, "%s\n", error.text);
    return 1;
  }
  const unsigned long before = atomic_load(&allocations);
  if (before == 0) {
    fprintf(stderr, "the count does not work\n");
    return 1;
  }
  for (int batch = 0; batch < atoi(argv[4]); ++batch) {
    int64_t ids[48];
    for (int i = 0; i < 48; ++i) ids[i] = (batch * 48 + i) % (int64_t)layer.rows;
    if (batch % 10 == 9) ids[7] = (int64_t)layer.rows; /* errors allocate nothing either */
    const int64_t ticket = engram_submit(session, &layer, ids, 8, 48, ENGRAM_LAYOUT_PACKED, -1, &error);
    const void* rows = ticket >= 0 ? engram_wait(session, ticket, -1, &error) : NULL;
    if ((rows == NULL) != (batch % 10 == 9)) {
      fprintf(stderr, "batch %d: %s\n", batch, error.text);
      return 1;
    }
    engram_release(session, ticket);
  }
  const unsigned long after = atomic_load(&allocations);
  int64_t sizes[2];
  if (engram_head_sizes(100, 1, 2, 2, sizes) != 0) return 1;
  printf("%lu %lld %lld\n", after - before, (long long)sizes[0], (long long)sizes[1]);
  engram_session_free(session);
  return 0;
}
