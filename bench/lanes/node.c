/* A vLLM node that computes nothing: a P leg is answered at once, a stream keeps to an absolute schedule.
 *
 * usage: node PORT
 *
 * Of a request's JSON body it reads "stream", "max_tokens" (events of the stream) and "seed" (events per second; 0 for
 * as fast as they go, in pieces of one event each, and the end a moment later: no answer ends with its first token). */
#include "stream.h"

enum { EVENTS = 512, READ_STEP = 1 << 18, MAX_FD = 65536, ASIDE = 4096 };
static const int64_t END_NS = 5000000; /* from the last token of a stream without a pace to its end */

typedef struct {
  int fd, place;          /* place: in the heap, -1 outside */
  int writable;           /* whether epoll watches for it */
  char *in, *out;
  size_t in_len, in_room, out_len, out_at, out_room;
  int64_t due, period;
  uint32_t tokens, sent;
} Peer;

static Peer *peers[MAX_FD];
static Peer *heap[MAX_FD]; /* streams, the one whose next event is due first at the top */
static int heap_len, poller;

static void put_at(int place, Peer *peer) { heap[place] = peer, peer->place = place; }

static void settle(int at) {
  Peer *peer = heap[at];
  for (; at && heap[(at - 1) / 2]->due > peer->due; at = (at - 1) / 2) put_at(at, heap[(at - 1) / 2]);
  for (int child; (child = 2 * at + 1) < heap_len; at = child) {
    if (child + 1 < heap_len && heap[child + 1]->due < heap[child]->due) child++;
    if (heap[child]->due >= peer->due) break;
    put_at(at, heap[child]);
  }
  put_at(at, peer);
}

static void schedule(Peer *peer) {
  put_at(heap_len++, peer);
  settle(heap_len - 1);
}

static void unschedule(Peer *peer) {
  if (peer->place < 0) return;
  Peer *last = heap[--heap_len];
  if (last != peer) {
    put_at(peer->place, last);
    settle(last->place);
  }
  peer->place = -1;
}

static void drop(Peer *peer) {
  unschedule(peer);
  close(peer->fd);
  peers[peer->fd] = NULL;
  free(peer->in);
  free(peer->out);
  free(peer);
}

static void watch(Peer *peer, int writable) {
  if (peer->writable == writable) return;
  struct epoll_event event = {.events = EPOLLIN | (writable ? EPOLLOUT : 0), .data.fd = peer->fd};
  epoll_ctl(poller, EPOLL_CTL_MOD, peer->fd, &event);
  peer->writable = writable;
}

/* Returns whether the peer is still there. */
static int flush(Peer *peer) {
  while (peer->out_at < peer->out_len) {
    ssize_t sent = send(peer->fd, peer->out + peer->out_at, peer->out_len - peer->out_at, MSG_NOSIGNAL);
    if (sent < 0) {
      if (errno != EAGAIN) return drop(peer), 0;
      return watch(peer, 1), 1;
    }
    peer->out_at += (size_t)sent;
  }
  peer->out_at = peer->out_len = 0;
  return watch(peer, 0), 1;
}

static void put(Peer *peer, const char *data, size_t len) {
  if (peer->out_len + len > peer->out_room) {
    peer->out_room = 2 * (peer->out_len + len) + 1024;
    peer->out = checked(realloc(peer->out, peer->out_room));
  }
  memcpy(peer->out + peer->out_len, data, len);
  peer->out_len += len;
}

static void put_chunk(Peer *peer, const char *data, size_t len) {
  char size[16];
  put(peer, size, (size_t)sprintf(size, "%zx\r\n", len));
  put(peer, data, len);
  put(peer, "\r\n", 2);
}

static void put_token(Peer *peer, int64_t now) {
  char event[TOKEN_BYTES + 1];
  int64_t late = (now - peer->due) / 1000;
  sprintf(event, TOKEN_HEAD "%016llx%08x%08x" TOKEN_TAIL, (unsigned long long)now, peer->sent++, (unsigned)late);
  put_chunk(peer, event, TOKEN_BYTES);
}

static void put_last(Peer *peer) {
  static const char last[] = LAST_HEAD "," HANDLE LAST_TAIL;
  put_chunk(peer, last, sizeof last - 1);
  put_chunk(peer, DONE, sizeof DONE - 1);
  put(peer, "0\r\n\r\n", 5);
}

static void put_body(Peer *peer, const char *status, const char *body) {
  char head[160];
  put(peer, head, (size_t)sprintf(head, "HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n\r\n",
                                  status, strlen(body)));
  put(peer, body, strlen(body));
}

/* A member's value in a body. Members of scalars stand at one end or the other, whatever rewrote the body: the messages
 * between them are looked through only if they do not. */
static const char *member(const char *body, size_t len, const char *name) {
  size_t aside = len < ASIDE ? len : ASIDE, room = strlen(name);
  const char *found = memmem(body, aside, name, room);
  if (!found) found = memmem(body + len - aside, aside, name, room);
  if (!found) found = memmem(body, len, name, room);
  if (!found) return "";
  for (found += room; *found == ' ' || *found == ':';) found++;
  return found;
}

static void answer(Peer *peer, const char *body, size_t len) {
  if (strncmp(member(body, len, "\"stream\""), "true", 4) != 0) {
    put_body(peer, "200 OK",
             "{\"id\":\"chatcmpl-bench\",\"object\":\"chat.completion\",\"created\":1760000000,\"model\":\"bench\","
             "\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"x\"},\"logprobs\":null,"
             "\"finish_reason\":\"length\"}],\"usage\":{\"prompt_tokens\":250,\"completion_tokens\":1,"
             "\"total_tokens\":251}," HANDLE "}");
    return;
  }
  static const char head[] = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
                             "transfer-encoding: chunked\r\n\r\n";
  put(peer, head, sizeof head - 1);
  long rate = atol(member(body, len, "\"seed\""));
  peer->tokens = (uint32_t)atol(member(body, len, "\"max_tokens\""));
  peer->sent = 0;
  peer->period = rate > 0 ? 1000000000LL / rate : 0;
  peer->due = now_ns();
  schedule(peer);
}

/* Answers a request that is there as a whole. Returns how many bytes it had, 0 if there is none. */
static size_t serve(Peer *peer) {
  peer->in[peer->in_len] = 0;
  char *end = memmem(peer->in, peer->in_len, "\r\n\r\n", 4);
  if (!end) return 0;
  *end = 0;
  const char *length = strcasestr(peer->in, "\r\ncontent-length:");
  int chunked = strcasestr(peer->in, "\r\ntransfer-encoding:") != NULL;
  size_t head = (size_t)(end + 4 - peer->in), body = length ? strtoul(length + 17, NULL, 10) : 0;
  *end = '\r';
  if (peer->in_len < head + body) return 0;
  if (chunked) put_body(peer, "411 Length Required", "{\"error\":\"send a content-length\"}");
  else if (strncmp(peer->in, "POST ", 5) == 0) answer(peer, peer->in + head, body);
  else put_body(peer, "200 OK", "{\"object\":\"list\",\"data\":[{\"id\":\"bench\",\"object\":\"model\"}],\"model_path\":\"bench\"}");
  return head + body;
}

static int serve_all(Peer *peer) {
  for (size_t used; peer->place < 0 && peer->in_len && (used = serve(peer));) {
    peer->in_len -= used;
    memmove(peer->in, peer->in + used, peer->in_len);
  }
  return flush(peer);
}

static void receive(Peer *peer) {
  for (;;) {
    if (peer->in_room - peer->in_len < READ_STEP) {
      peer->in_room = 2 * peer->in_room + 2 * READ_STEP;
      peer->in = checked(realloc(peer->in, peer->in_room));
    }
    ssize_t got = recv(peer->fd, peer->in + peer->in_len, READ_STEP - 1, 0);
    if (got > 0) peer->in_len += (size_t)got;
    else if (got < 0 && errno == EAGAIN) break;
    else { drop(peer); return; }
  }
  serve_all(peer);
}

/* From a stream's first token to its second: each has another phase, spread evenly by the golden ratio, whatever stood
 * between client and node. Else streams that begin at regular intervals would fall into step through the plain Envoy
 * alone, and tokens that come together cost less. */
static int64_t own_phase(int64_t period) {
  static uint32_t streams;
  return (int64_t)(((streams++ * 2654435769u) >> 8) * (double)period / (1 << 24));
}

/* Sends what is due. Returns when the next event is, INT64_MAX if there is none. */
static int64_t stream(void) {
  while (heap_len) {
    Peer *peer = heap[0];
    int64_t now = now_ns();
    if (peer->due > now) return peer->due;
    if (peer->sent < peer->tokens) {
      put_token(peer, now);
      if (peer->period) peer->due += peer->sent == 1 ? own_phase(peer->period) : peer->period;
      else peer->due = peer->sent < peer->tokens ? now : now + END_NS;
      settle(0);
      if (!peer->writable) flush(peer);
      continue;
    }
    unschedule(peer);
    put_last(peer);
    serve_all(peer);
  }
  return INT64_MAX;
}

static void welcome(int listener) {
  for (int fd; (fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0;) {
    if (fd >= MAX_FD) { close(fd); continue; }
    prepare_socket(fd);
    Peer *peer = peers[fd] = checked(calloc(1, sizeof *peer));
    peer->fd = fd, peer->place = -1;
    struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};
    epoll_ctl(poller, EPOLL_CTL_ADD, fd, &event);
  }
}

int main(int count, char **words) {
  if (count != 2) return fputs("usage: node PORT\n", stderr), 2;
  signal(SIGPIPE, SIG_IGN);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  prctl(PR_SET_TIMERSLACK, 1);
  int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), one = 1;
  setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  struct sockaddr_in address = loopback(atoi(words[1]));
  if (bind(listener, (void *)&address, sizeof address) || listen(listener, 4096)) return perror("bind"), 1;
  poller = epoll_create1(0);
  struct epoll_event event = {.events = EPOLLIN, .data.fd = listener}, events[EVENTS];
  epoll_ctl(poller, EPOLL_CTL_ADD, listener, &event);
  for (;;) {
    int64_t next = stream(), wait = next - now_ns();
    struct timespec timeout = {wait / 1000000000, wait % 1000000000};
    if (wait < 0) timeout = (struct timespec){0};
    int ready = epoll_pwait2(poller, events, EVENTS, next == INT64_MAX ? NULL : &timeout, NULL);
    for (int i = 0; i < ready; i++) {
      int fd = events[i].data.fd;
      if (fd == listener) { welcome(fd); continue; }
      Peer *peer = peers[fd];
      if (peer && events[i].events & EPOLLOUT && !flush(peer)) continue;
      if (peer && events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) receive(peer);
    }
  }
}
