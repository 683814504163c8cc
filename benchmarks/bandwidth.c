// The machine's limits: streaming read and copy, n bytes over `threads` OpenMP threads.
// 64-byte vectors compile to whatever the target has; prefetching 2 KB ahead is worth 10 % of DRAM bandwidth on one core.
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef long long lanes __attribute__((vector_size(64), aligned(64)));

static uint64_t read_part(const char *data, size_t bytes) {
    lanes sum[4] = {{0}, {0}, {0}, {0}};
    for (size_t at = 0; at + 256 <= bytes; at += 256) {
        const lanes *row = (const lanes *)(data + at);
        for (int i = 0; i < 4; i++) __builtin_prefetch(data + at + 2048 + 64 * i);
        for (int i = 0; i < 4; i++) sum[i] += row[i];
    }
    lanes all = sum[0] + sum[1] + sum[2] + sum[3];
    uint64_t total = 0;
    for (int i = 0; i < 8; i++) total += (uint64_t)all[i];
    return total;
}

// data must be 64-byte aligned; the last few bytes (less than 256 a thread) are not read.
uint64_t kvq_read(const char *data, size_t bytes, int threads) {
    const size_t part = (bytes / (size_t)threads) & ~(size_t)255;
    uint64_t total = 0;
    if (threads == 1) return read_part(data, part);
#pragma omp parallel for num_threads(threads) reduction(+ : total) schedule(static, 1)
    for (int i = 0; i < threads; i++) total += read_part(data + part * (size_t)i, part);
    return total;
}

void kvq_copy(char *to, const char *from, size_t bytes, int threads) {
    const size_t part = (bytes / (size_t)threads) & ~(size_t)255;
    if (threads == 1) {
        memcpy(to, from, bytes);
        return;
    }
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int i = 0; i < threads; i++) memcpy(to + part * (size_t)i, from + part * (size_t)i, part);
}
