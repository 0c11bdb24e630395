/* What node and client agree on: a stream's events, byte for byte, so that the client can tell a lost, changed or
 * reordered one. Times are CLOCK_MONOTONIC, which all processes of a machine share. */
#ifndef STREAM_H
#define STREAM_H

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define BEFORE "data: {\"id\":\"chatcmpl-bench\",\"object\":\"chat.completion.chunk\",\"created\":1760000000,\"model\":\"bench\","
/* One token: 16 hex digits of when it was sent (ns), 8 of its number, 8 of how late the node was (us). As long as one
 * of vLLM's. */
#define TOKEN_HEAD BEFORE "\"choices\":[{\"index\":0,\"delta\":{\"content\":\""
#define TOKEN_TAIL "\"},\"logprobs\":null,\"finish_reason\":null}]}\n\n"
#define STAMP_BYTES 32
#define HEAD_BYTES (sizeof TOKEN_HEAD - 1)
#define TAIL_BYTES (sizeof TOKEN_TAIL - 1)
#define TOKEN_BYTES (HEAD_BYTES + STAMP_BYTES + TAIL_BYTES)
/* The terminal event; what the handle adds to it stands between the two. */
#define LAST_HEAD BEFORE "\"choices\":[{\"index\":0,\"delta\":{\"content\":\"\"},\"logprobs\":null,\"finish_reason\":\"stop\"}]"
#define HANDLE                                                                                                         \
  "\"kv_transfer_params\":{\"do_remote_prefill\":false,\"do_remote_decode\":true,"                                    \
  "\"remote_block_ids\":[[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16]],\"remote_engine_id\":\"bench\","                    \
  "\"remote_request_id\":\"chatcmpl-bench\",\"remote_host\":\"127.0.0.1\",\"remote_port\":5600,\"tp_size\":1,"         \
  "\"remote_num_tokens\":250}"
#define LAST_TAIL "}\n\n"
#define DONE "data: [DONE]\n\n"

static inline int64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static inline void prepare_socket(int fd) {
  int one = 1;
  fcntl(fd, F_SETFL, O_NONBLOCK);
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
}

static inline struct sockaddr_in loopback(int port) {
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

static inline void *checked(void *memory) {
  if (!memory) {
    fputs("out of memory\n", stderr);
    exit(1);
  }
  return memory;
}

#endif
