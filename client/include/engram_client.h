/* The C client of engramd, for C and C++ servers: link with -lengram_client (pkg-config engram-client).
 *
 *   engram_session *session = engram_connect("/run/engramd/engramd.sock", NULL, &error);
 *   engram_find_layer(session, "flash", 1, NULL, &layer, &error)
 *   ticket = engram_submit(session, &layer, ids, sizeof ids[0], count, ENGRAM_LAYOUT_PACKED, -1, &error);
 *   rows = engram_wait(session, ticket, -1, &error);
 *   engram_release(session, ticket);
 *   engram_session_free(session);
 *
 * After ENGRAM_STATUS_LOST the session serves no more: free it and connect again. After ENGRAM_STATUS_STALE the table
 * was reloaded: engram_session_refresh, find the layer again, and engram_resubmit the ticket. error.text is a sentence.
 * client/examples/fetch_rows.c is a whole program.
 *
 * engram/client.h says what each call does, engram/hash.h how token ids become row ids. There is one definition of
 * each: the Python client is built from the same two headers. */
#pragma once
#include "engram/client.h"
#include "engram/hash.h"
