/* Fetches rows and writes them to stdout: fetch_rows SOCKET TABLE LAYER ID...
 *
 * Build: cc fetch_rows.c $(pkg-config --cflags --libs engram-client) -o fetch_rows */
#include <engram_client.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

static int failed(const char* what, const engram_error* error) {
  fprintf(stderr, "error: %s: %s\n", what, error->text);
  return 1;
}

int main(int argc, char** argv) {
  if (argc < 5) {
    fprintf(stderr, "usage: %s SOCKET TABLE LAYER ID...\n", argv[0]);
    return 2;
  }
  const uint64_t count = (uint64_t)argc - 4;
  int64_t* ids = malloc(count * sizeof *ids);
  if (ids == NULL) return 1;
  for (uint64_t i = 0; i < count; ++i) {
    char* end;
    errno = 0;
    ids[i] = strtoll(argv[4 + i], &end, 10);
    if (errno != 0 || *end != 0) {
      fprintf(stderr, "error: '%s' is no row id\n", argv[4 + i]);
      free(ids);
      return 2;
    }
  }

  engram_error error = {0};
  int result = 1;
  engram_session* session = engram_connect(argv[1], NULL, &error);
  if (session == NULL) {
    failed("connect", &error);
    free(ids);
    return 1;
  }
  engram_layer layer;
  if (engram_find_layer(session, argv[2], (uint32_t)strtoul(argv[3], NULL, 10), NULL, &layer, &error) != 0) {
    failed("table", &error);
  } else if (count <= engram_session_ticket_rows(session, layer.row_bytes)) {
    /* One ticket: the rows lie in shared memory, and nothing is copied or allocated. */
    const int64_t ticket = engram_submit(session, &layer, ids, sizeof ids[0], count, ENGRAM_LAYOUT_PACKED, -1, &error);
    const void* rows = ticket >= 0 ? engram_wait(session, ticket, -1, &error) : NULL;
    if (rows == NULL) {
      failed("fetch", &error);
    } else {
      result = fwrite(rows, layer.row_bytes, count, stdout) == count ? 0 : 1;
    }
    if (ticket >= 0) engram_release(session, ticket);
  } else {
    fprintf(stderr, "error: %llu rows are too many for one ticket; engram_fetch_run takes any number\n",
            (unsigned long long)count);
  }
  engram_session_free(session);
  free(ids);
  return result;
}
