"""How fast this machine reads memory, by a loop in C with as many threads as the engine has."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

__all__ = ["read_bandwidth"]

SOURCE = r"""
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static size_t n; static uint64_t *data; static int threads, rounds;
static uint64_t sums[64];

static void *work(void *arg) {
    int id = (int)(intptr_t)arg;
    size_t from = n / threads * id, to = n / threads * (id + 1);
    uint64_t a = 0, b = 0, c = 0, d = 0;
    for (int r = 0; r < rounds; r++)
        for (size_t i = from; i + 4 <= to; i += 4) {
            a += data[i]; b += data[i + 1]; c += data[i + 2]; d += data[i + 3];
        }
    sums[id] = a + b + c + d;
    return 0;
}

int main(int argc, char **argv) {
    threads = atoi(argv[1]); n = (size_t)atol(argv[2]) * 131072; rounds = atoi(argv[3]);
    data = malloc(n * 8);
    for (size_t i = 0; i < n; i++) data[i] = i;
    double best = 0;
    for (int t = 0; t < 5; t++) {
        struct timespec t0, t1; pthread_t ids[64];
        clock_gettime(CLOCK_MONOTONIC, &t0);
        for (int i = 0; i < threads; i++) pthread_create(&ids[i], 0, work, (void *)(intptr_t)i);
        for (int i = 0; i < threads; i++) pthread_join(ids[i], 0);
        clock_gettime(CLOCK_MONOTONIC, &t1);
        double s = (t1.tv_sec - t0.tv_sec) + 1e-9 * (t1.tv_nsec - t0.tv_nsec);
        double rate = 8.0 * n * rounds / s;
        if (rate > best) best = rate;
    }
    uint64_t total = 0; for (int i = 0; i < threads; i++) total += sums[i];
    fprintf(stderr, "%llu\n", (unsigned long long)total);
    printf("%.0f\n", best);
}
"""


def read_bandwidth(threads: int, mebibytes: int = 512) -> float | None:
    """Bytes a second, the best of five passes over a block that no cache holds; None without a C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder) / "read.c", Path(folder) / "read"
        source.write_text(SOURCE)
        subprocess.run([compiler, "-O3", "-march=native", "-pthread", source, "-o", program], check=True)
        done = subprocess.run(
            [program, str(threads), str(mebibytes), "4"], capture_output=True, text=True, check=True
        )
    return float(done.stdout)
