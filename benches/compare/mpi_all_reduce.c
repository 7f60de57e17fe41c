/* All-reduces (sums) of f32 with MPI, timed as `accel-launch bench all-reduce` times its own:
 * see launcher/src/commands/bench/README.md. Built and started by all_reduce.py.
 *
 * mpi_all_reduce WARMUP BYTES:ITERATIONS...
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCKS = 100 };

static int rank, ranks;

static float value(size_t index, int of) { return (float)((index + (size_t)of) % 7); }

static int ascending(const void *a, const void *b) {
    double difference = *(const double *)a - *(const double *)b;
    return (difference > 0) - (difference < 0);
}

static void all_reduce(float *values, size_t len) {
    MPI_Allreduce(MPI_IN_PLACE, values, (int)len, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}

/* Sums known values, and compares every sum. */
static void check(float *values, size_t len) {
    for (size_t i = 0; i < len; i++)
        values[i] = value(i, rank);
    all_reduce(values, len);
    for (size_t i = 0; i < len; i++) {
        float expected = 0;
        for (int other = 0; other < ranks; other++)
            expected += value(i, other);
        if (values[i] != expected) {
            fprintf(stderr, "rank %d: expected %g at index %zu, found %g\n", rank, expected, i, values[i]);
            MPI_Abort(MPI_COMM_WORLD, 1);
        }
    }
}

static double sample(size_t bytes, size_t iterations, size_t warmup) {
    size_t len = bytes / sizeof(float);
    size_t blocks = iterations < BLOCKS ? iterations : BLOCKS;
    float *values = aligned_alloc(64, (bytes + 63) / 64 * 64);
    double *times = malloc(blocks * sizeof(double));
    double *slowest = malloc(blocks * sizeof(double));
    if (!values || !times || !slowest)
        MPI_Abort(MPI_COMM_WORLD, 1);
    for (size_t n = 0; n < warmup; n++)
        check(values, len);
    memset(values, 0, bytes);
    all_reduce(values, len);
    for (size_t n = 0; n < blocks; n++) {
        size_t operations = iterations * (n + 1) / blocks - iterations * n / blocks;
        double start = MPI_Wtime();
        for (size_t operation = 0; operation < operations; operation++)
            all_reduce(values, len);
        times[n] = (MPI_Wtime() - start) / (double)operations;
    }
    check(values, len);
    MPI_Allreduce(times, slowest, (int)blocks, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    qsort(slowest, blocks, sizeof(double), ascending);
    double median = (slowest[(blocks - 1) / 2] + slowest[blocks / 2]) / 2;
    free(values);
    free(times);
    free(slowest);
    return median;
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    if (argc < 3) {
        fprintf(stderr, "expected WARMUP BYTES:ITERATIONS...\n");
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    size_t warmup = strtoul(argv[1], NULL, 10);
    for (int n = 2; n < argc; n++) {
        char *rest;
        size_t bytes = strtoul(argv[n], &rest, 10);
        size_t iterations = *rest == ':' ? strtoul(rest + 1, NULL, 10) : 20;
        double seconds = sample(bytes, iterations, warmup);
        if (rank == 0)
            printf("{\"bytes\": %zu, \"seconds\": %.9g}\n", bytes, seconds);
    }
    MPI_Finalize();
    return 0;
}
