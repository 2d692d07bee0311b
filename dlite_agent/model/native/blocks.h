/* Weights in blocks of NR outputs x BLOCK inputs, each in the smallest form that holds them exactly.

   BF16: for each pair of inputs, NR pairs of numbers. Q8: w = scale * q, q a signed byte: for each four inputs, NR words
   of four bytes; then NR scales. Q4: w = scale * q + least, q of 0..15: for each eight inputs, NR words of eight nibbles
   (the even inputs in the low half, the odd ones in the high half); then NR scales and NR leasts, in fp16. These are the
   numbers of GGUF's Q8_0 and Q4_1, so that nothing is lost against the file.

   Where the processor has tiles (AMX), products are of bf16 numbers with fp32 sums (tiles.h). Elsewhere a block is expanded to fp32 and multiplied as it is. */
#pragma once

static const int BYTES[] = {0, 0, 1024, 512 + 32, 256 + 64};

INLINE const char *block_at(const Linear *linear, int64_t panel, int64_t block) {
    return (const char *)linear->weight + (panel * (linear->k / BLOCK) + block) * BYTES[linear->kind];
}

INLINE ivec words(const char *at, int v) { return *(const iloose *)(at + v * 4 * LANES); }

typedef struct {
    vec scale, least;
} Grid;

/* The grids of outputs v * LANES.. of a block. */
INLINE Grid grid_of(int64_t kind, const char *block, int v) {
    Grid grid = {{0}, {0}};
    const uint16_t *at = (const uint16_t *)(block + (kind == Q4 ? 256 : 512)) + v * LANES;
    if (kind != BF16) grid.scale = from_half(at);
    if (kind == Q4) grid.least = from_half(at + NR);
    return grid;
}

/* What a block adds to its outputs: `sum` is that of q * x, `x_sum` that of x. */
INLINE vec on_grid(int64_t kind, Grid grid, vec sum, float x_sum) {
    if (kind == BF16) return sum;
    return kind == Q4 ? grid.scale * sum + grid.least * x_sum : grid.scale * sum;
}

/* The numbers q of a block as fp32, [BLOCK][NR]. */
INLINE void unpack(int64_t kind, const char *block, float *out) {
    for (int v = 0; v < VN; v++) {
        float *to = out + v * LANES;
        if (kind == BF16)
            for (int i = 0; i < BLOCK; i += 2) {
                ivec pair = words(block + i * NR * 2, v);
                store(to + i * NR, (vec)(pair << 16));
                store(to + (i + 1) * NR, (vec)(pair & (int32_t)0xffff0000));
            }
        else if (kind == Q8)
            for (int i = 0; i < BLOCK; i += 4) {
                ivec four = words(block + i * NR, v);
                for (int t = 0; t < 4; t++)
                    store(to + (i + t) * NR, __builtin_convertvector((four << (24 - 8 * t)) >> 24, vec));
            }
        else
            for (int i = 0; i < BLOCK; i += 8) {
                ivec eight = words(block + i * NR / 2, v);
                for (int t = 0; t < 8; t++)
                    store(to + (i + t) * NR, __builtin_convertvector((eight >> (4 * (t / 2) + 16 * (t % 2))) & 15, vec));
            }
    }
}

#define TILE_ROWS 16
#define CHAINS 4

INLINE void plain_blocks(int64_t kind, const Linear *linear, const Input *in, const int64_t *at, int count, Emit *emit,
                         void *into) {
    int64_t k = in->k, blocks = k / BLOCK;
    float q[BLOCK * NR], out[64 * GROUP * NR];
    for (int64_t first = 0; first < in->rows; first += 64) {
        int64_t rows = in->rows - first < 64 ? in->rows - first : 64;
        memset(out, 0, rows * GROUP * NR * sizeof(float));
        for (int g = 0; g < count; g++)
            for (int64_t b = 0; b < blocks; b++) {
                const char *block = block_at(linear, at[g], b);
                Grid grid[VN];
                unpack(kind, block, q);
                for (int v = 0; v < VN; v++) grid[v] = grid_of(kind, block, v);
                for (int64_t r = 0; r < rows; r++) {
                    const float *x = in->x + (first + r) * k + b * BLOCK;
                    float *to = out + (r * GROUP + g) * NR, x_sum = in->sums[(first + r) * blocks + b];
                    for (int v = 0; v < VN; v++) {
                        vec sum[CHAINS] = {{0}};
                        for (int i = 0; i < BLOCK; i++) sum[i % CHAINS] += x[i] * load(q + i * NR + v * LANES);
                        vec all = (sum[0] + sum[1]) + (sum[2] + sum[3]);
                        store(to + v * LANES, load(to + v * LANES) + on_grid(kind, grid[v], all, x_sum));
                    }
                }
            }
        for (int64_t r = 0; r < rows; r++) emit(into, linear, first + r, at, count, out + r * GROUP * NR);
    }
}

#ifdef __AMX_BF16__
#include "tiles.h"
#else
static int tiles_ready(void) { return 0; }
static void tiles_done(void) {}
INLINE void tile_blocks(int64_t kind, const Linear *linear, const Input *in, const int64_t *at, int count, Emit *emit,
                        void *into) {}
INLINE void wide_blocks(int64_t kind, const Linear *linear, const Input *in, const int64_t *at, int count, Emit *emit,
                        void *into) {}
INLINE void split(const Input *in, int64_t first) {}
#endif

static void block_group(const Linear *linear, const Input *in, const int64_t *at, int count, Emit *emit, void *into) {
    if (in->wide) {
        if (linear->kind == BF16) wide_blocks(BF16, linear, in, at, count, emit, into);
        else if (linear->kind == Q8) wide_blocks(Q8, linear, in, at, count, emit, into);
        else wide_blocks(Q4, linear, in, at, count, emit, into);
    } else if (tiles_ready()) {
        if (linear->kind == BF16) tile_blocks(BF16, linear, in, at, count, emit, into);
        else if (linear->kind == Q8) tile_blocks(Q8, linear, in, at, count, emit, into);
        else tile_blocks(Q4, linear, in, at, count, emit, into);
    } else if (linear->kind == BF16) plain_blocks(BF16, linear, in, at, count, emit, into);
    else if (linear->kind == Q8) plain_blocks(Q8, linear, in, at, count, emit, into);
    else plain_blocks(Q4, linear, in, at, count, emit, into);
}

/* `x` [rows, k] with what a product with these weights, or others of their kind and k, needs of it; `memory` holds
   input_size floats and lives as long. */
static Input prepare(const Linear *linear, const float *x, int64_t rows, float *memory) {
    int64_t k = linear->k, blocks = k / BLOCK;
    Input in = {.x = x, .rows = rows, .k = k, .sums = memory};
    if (linear->kind < BF16) return in;
    memory = aligned(memory + rows * blocks);
    in.expanded = memory;
    in.halves = (uint16_t *)(memory + GROUP * NR * k);
    for (int64_t i = 0; i < rows * blocks; i++) {
        vec sum = {0};
        for (int j = 0; j < BLOCK; j += LANES) sum += load(x + i * BLOCK + j);
        in.sums[i] = total(sum);
    }
    for (int64_t first = 0; tiles_ready() && first < rows; first += TILE_ROWS) split(&in, first);
    return in;
}

/* The same for a prompt, whose halves lie in `shared` and are made by `split`; both memories hold input_size floats. */
static Input prompt_input(const Linear *linear, const float *x, int64_t rows, float *shared, float *own) {
    int64_t k = linear->k;
    Input in = {.x = x, .rows = rows, .k = k, .wide = 1, .expanded = aligned(own)};
    in.halves = (uint16_t *)(aligned(shared) + GROUP * NR * k);
    return in;
}
