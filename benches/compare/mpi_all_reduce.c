/* All-reduces (sums) of f32 with MPI, timed as `accel-launch bench all-reduce` times its own:
 * see launcher/src/bench/README.md. Built and started by all_reduce.py.
 *
 * mpi_all_reduce WARMUP BYTES:ITERATIONS...
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MODULUS = 7, REPEATS = 512, BLOCK = MODULUS * REPEATS, SHORT = 16 * 1024, OPERATIONS = 100 };

static float table[BLOCK + MODULUS];
static int rank, ranks;

/* Element i of operation k on rank r is (i + 13k + 11r) mod 7. */
static void write_input(float *values, size_t len, size_t operation) {
    const float *block = table + (13 * operation + 11 * (size_t)rank) % MODULUS;
    for (size_t at = 0; at < len; at += BLOCK) {
        size_t part = len - at < BLOCK ? len - at : BLOCK;
        memcpy(values + at, block, part * sizeof(float));
    }
}

static void check(const float *values, size_t len, size_t operation) {
    float expected[MODULUS];
    for (size_t shift = 0; shift < MODULUS; shift++) {
        expected[shift] = 0;
        for (int other = 0; other < ranks; other++)
            expected[shift] += (float)((shift + 13 * operation + 11 * (size_t)other) % MODULUS);
    }
    for (size_t i = 0; i < len; i++) {
        if (values[i] != expected[i % MODULUS]) {
            fprintf(stderr, "rank %d: expected %g at index %zu, found %g\n", rank,
                    expected[i % MODULUS], i, values[i]);
            MPI_Abort(MPI_COMM_WORLD, 1);
        }
    }
}

static int ascending(const void *a, const void *b) {
    double difference = *(const double *)a - *(const double *)b;
    return (difference > 0) - (difference < 0);
}

static void all_reduce(float *values, size_t len) {
    MPI_Allreduce(MPI_IN_PLACE, values, (int)len, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}

static double sample(size_t bytes, size_t iterations, size_t warmup) {
    size_t len = bytes / sizeof(float), operation = 0;
    size_t operations = bytes <= SHORT ? OPERATIONS : 1;
    float *values = aligned_alloc(64, (bytes + 63) / 64 * 64);
    double *times = malloc(iterations * sizeof(double));
    double *slowest = malloc(iterations * sizeof(double));
    if (!values || !times || !slowest)
        MPI_Abort(MPI_COMM_WORLD, 1);
    for (size_t n = 0; n < warmup; n++, operation++) {
        write_input(values, len, operation);
        all_reduce(values, len);
        check(values, len, operation);
    }
    for (size_t n = 0; n < iterations; n++) {
        if (operations == 1)
            write_input(values, len, operation);
        MPI_Barrier(MPI_COMM_WORLD);
        double start = MPI_Wtime();
        if (operations == 1) {
            all_reduce(values, len);
        } else {
            for (size_t k = operation; k < operation + operations; k++) {
                write_input(values, len, k);
                all_reduce(values, len);
            }
        }
        times[n] = (MPI_Wtime() - start) / (double)operations;
        operation += operations;
    }
    check(values, len, operation - 1);
    MPI_Allreduce(times, slowest, (int)iterations, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    qsort(slowest, iterations, sizeof(double), ascending);
    double median = (slowest[(iterations - 1) / 2] + slowest[iterations / 2]) / 2;
    free(values);
    free(times);
    free(slowest);
    return median;
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    for (size_t i = 0; i < BLOCK + MODULUS; i++)
        table[i] = (float)(i % MODULUS);
    size_t warmup = argc > 1 ? strtoul(argv[1], NULL, 10) : 5;
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
