/* All-reduces (sums) of f32 with MPI, timed as `accel-launch bench all-reduce` times its own:
 * see launcher/src/commands/bench/README.md. Built and started by all_reduce.py.
 *
 * mpi_all_reduce VALUES PERIOD WARMUP BYTES:ITERATIONS...
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* As in launcher/src/commands/bench: the stripes, the blocks. */
enum { MOST = 7, REPEATS = 512, PARTS = 64, BLOCKS = 100 };

static float table[MOST * (REPEATS + 1)];
static int rank, ranks;
static size_t modulus, period, block_len;

static size_t start_of(size_t len, size_t part) { return len * part / PARTS; }

/* Element i of operation k on rank r is (i + 13k + 11r) mod VALUES; a whole one begins a period, and then
 * each operation writes a stripe over the sums of the one before. */
static void write_input(float *values, size_t len, size_t operation) {
    size_t part = operation % period;
    size_t from = part ? start_of(len, part) : 0, to = part ? start_of(len, part + 1) : len;
    const float *block = table + (from + 13 * operation + 11 * (size_t)rank) % modulus;
    for (size_t at = from; at < to; at += block_len) {
        size_t count = to - at < block_len ? to - at : block_len;
        memcpy(values + at, block, count * sizeof(float));
    }
}

static float sum_of(size_t index) {
    float sum = 0;
    for (int other = 0; other < ranks; other++)
        sum += (float)((index + 11 * (size_t)other) % modulus);
    return sum;
}

static void check(const float *values, size_t len, size_t operation) {
    size_t begun = operation % period;
    for (size_t part = 0; part < PARTS; part++) {
        size_t again = part <= begun ? begun - part : begun;
        float expected[MOST];
        for (size_t shift = 0; shift < modulus; shift++) {
            expected[shift] = sum_of(shift + 13 * (operation - again));
            for (size_t n = 0; n < again; n++)
                expected[shift] *= (float)ranks;
        }
        for (size_t i = start_of(len, part); i < start_of(len, part + 1); i++) {
            if (values[i] != expected[i % modulus]) {
                fprintf(stderr, "rank %d: expected %g at index %zu, found %g\n", rank,
                        expected[i % modulus], i, values[i]);
                MPI_Abort(MPI_COMM_WORLD, 1);
            }
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
    size_t blocks = iterations < BLOCKS ? iterations : BLOCKS;
    float *values = aligned_alloc(64, (bytes + 63) / 64 * 64);
    double *times = malloc(blocks * sizeof(double));
    double *slowest = malloc(blocks * sizeof(double));
    if (!values || !times || !slowest)
        MPI_Abort(MPI_COMM_WORLD, 1);
    for (size_t n = 0; n < warmup; n++, operation++) {
        write_input(values, len, operation);
        all_reduce(values, len);
        check(values, len, operation);
    }
    MPI_Barrier(MPI_COMM_WORLD);
    for (size_t n = 0; n < blocks; n++) {
        size_t end = operation + iterations * (n + 1) / blocks - iterations * n / blocks;
        size_t operations = end - operation;
        double start = MPI_Wtime();
        for (; operation < end; operation++) {
            write_input(values, len, operation);
            all_reduce(values, len);
        }
        times[n] = (MPI_Wtime() - start) / (double)operations;
    }
    check(values, len, operation - 1);
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
    if (argc < 4 || strtoul(argv[1], NULL, 10) < 1 || strtoul(argv[1], NULL, 10) > MOST) {
        fprintf(stderr, "expected VALUES (1 to %d) PERIOD WARMUP BYTES:ITERATIONS...\n", MOST);
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    modulus = strtoul(argv[1], NULL, 10);
    period = strtoul(argv[2], NULL, 10);
    block_len = modulus * REPEATS;
    for (size_t i = 0; i < block_len + modulus; i++)
        table[i] = (float)(i % modulus);
    size_t warmup = strtoul(argv[3], NULL, 10);
    for (int n = 4; n < argc; n++) {
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
