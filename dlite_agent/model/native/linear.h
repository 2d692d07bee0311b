/* Products of a few rows with packed weights, and the vector helpers that the forward shares.

   Weights [n, k] are packed in panels of NR outputs, the last panel padded with zeros; `group` computes up to GROUP
   panels together. An output's chain of operations is the same whatever the number of rows, so a row's result does not
   depend on who shares the batch. */
#pragma once
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef __AVX512F__
#define LANES 16
#define WIDEST 4 /* panels whose sums fit the registers beside MAX_TILE rows */
#else
#define LANES 8
#define WIDEST 1
#endif
#define NR 16
#define VN (NR / LANES)
#define MAX_TILE 6
#define GROUP 4 /* their weights stay in the second-level cache while row tiles pass */
#define BLOCK 32
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float loose __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef int32_t iloose __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

/* FP32 and FP16: panel p holds w[p * NR + c][i] at (p * k + i) * NR + c. The others: see blocks.h. */
enum kind { FP32, FP16, BF16, Q8, Q4 };

typedef struct {
    const void *weight;
    const float *bias; /* padded like the weights, or null */
    int64_t n, k, kind;
} Linear;

/* Rows of a product's input: as they are and, for weights in blocks, their sums by blocks, and two bf16 halves whose sum
   keeps 16 bits of each number, laid out as tiles.h reads them. */
typedef struct {
    const float *x; /* [rows, k] */
    float *sums;    /* [rows, k / BLOCK] */
    uint16_t *halves;
    void *expanded; /* room for GROUP panels in two bf16 halves */
    int64_t rows, k, wide; /* wide: many rows of a prompt, see tiles.h */
} Input;

INLINE vec load(const float *at) { return *(const loose *)at; }
INLINE void store(float *at, vec x) { *(loose *)at = x; }

INLINE vec choose(ivec where, vec yes, vec no) { return (vec)((where & (ivec)yes) | (~where & (ivec)no)); }

INLINE float total(vec x) {
    float sum = 0;
    for (int i = LANES / 2; i; i /= 2)
        for (int j = 0; j < i; j++) x[j] += x[j + i];
    return sum + x[0];
}

INLINE vec from_half(const uint16_t *at) {
#ifdef __AVX512F__
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)at));
#else
    return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)at));
#endif
}

/* To a whole cache line. */
INLINE float *aligned(float *at) { return (float *)(((uintptr_t)at + 63) & ~(uintptr_t)63); }

INLINE int64_t panels_of(const Linear *linear) { return (linear->n + NR - 1) / NR; }

/* Floats of memory that `prepare` needs for so many rows of up to k numbers. */
INLINE int64_t input_size(int64_t rows, int64_t k) { return rows * (k + k / BLOCK + 1) + GROUP * NR * k + 64; }

static Input prepare(const Linear *linear, const float *x, int64_t rows, float *memory);

/* Called for each row: NR values of each of `count` panels at[..]. */
typedef void Emit(void *into, const Linear *linear, int64_t row, const int64_t *at, int count, const float *values);

INLINE vec weights(const void *panel, int64_t kind, int64_t i, int v) {
    if (kind == FP32) return load((const float *)panel + i * NR + v * LANES);
    return from_half((const uint16_t *)panel + i * NR + v * LANES);
}

/* out [rows][GROUP * NR] = x [rows, k] times `wide` panels. */
INLINE void tile(int rows, int wide, int64_t kind, const void *const *panel, const float *x, int64_t k, float *out) {
    vec sum[MAX_TILE * WIDEST * 2 * VN];
    for (int i = 0; i < rows * wide * VN; i++) sum[i] = (vec){0};
    for (int64_t i = 0; i < k; i++)
        for (int q = 0; q < wide; q++)
            for (int v = 0; v < VN; v++) {
                vec w = weights(panel[q], kind, i, v);
                for (int r = 0; r < rows; r++) sum[(r * wide + q) * VN + v] += x[r * k + i] * w;
            }
    for (int r = 0; r < rows; r++)
        for (int q = 0; q < wide * VN; q++) store(out + r * GROUP * NR + q * LANES, sum[r * wide * VN + q]);
}

#define CASE(ROWS, KIND)                                                                        \
    case ROWS:                                                                                  \
        if (ROWS <= 2 && WIDEST == 1 && count >= 2) wide = 2, tile(ROWS, 2, KIND, panel, x, k, out); \
        else if (WIDEST == 4 && count >= 4) wide = 4, tile(ROWS, WIDEST, KIND, panel, x, k, out);    \
        else wide = 1, tile(ROWS, 1, KIND, panel, x, k, out);                                   \
        break;
#define CASES(KIND) \
    switch (rows) { CASE(1, KIND) CASE(2, KIND) CASE(3, KIND) CASE(4, KIND) CASE(5, KIND) CASE(6, KIND) }

/* The first panels of `panel`; returns how many of the `count` were computed. */
static int run_tile(int rows, int count, int64_t kind, const void *const *panel, const float *x, int64_t k, float *out) {
    int wide = 1;
    if (kind == FP32) CASES(FP32) else CASES(FP16)
    return wide;
}

static void dense_group(const Linear *linear, const Input *in, const int64_t *at, int count, Emit *emit, void *into) {
    const void *panel[GROUP];
    float out[MAX_TILE * GROUP * NR];
    int64_t k = in->k, tiles = (in->rows + MAX_TILE - 1) / MAX_TILE;
    for (int g = 0; g < count; g++)
        panel[g] = (const char *)linear->weight + at[g] * k * NR * (linear->kind == FP32 ? 4 : 2);
    for (int64_t t = 0; t < tiles; t++) {
        int64_t row = in->rows * t / tiles, rows = in->rows * (t + 1) / tiles - row;
        for (int g = 0; g < count;)
            g += run_tile((int)rows, count - g, linear->kind, panel + g, in->x + row * k, k, out + g * NR);
        for (int64_t r = 0; r < rows; r++) emit(into, linear, row + r, at, count, out + r * GROUP * NR);
    }
}

#include "blocks.h"

/* Panels at[0 .. count) of x times the weights. */
INLINE void group(const Linear *linear, const Input *in, const int64_t *at, int count, Emit *emit, void *into) {
    if (linear->kind < BF16) dense_group(linear, in, at, count, emit, into);
    else block_group(linear, in, at, count, emit, into);
}

/* Panels [first, last). */
INLINE void panels(const Linear *linear, const Input *in, int64_t first, int64_t last, Emit *emit, void *into) {
    for (int64_t p = first; p < last; p += GROUP) {
        int64_t at[GROUP] = {p, p + 1, p + 2, p + 3};
        group(linear, in, at, last - p < GROUP ? (int)(last - p) : GROUP, emit, into);
    }
}

/* Values of a panel with their biases; returns how many of them are outputs. */
INLINE int with_bias(const Linear *linear, int64_t panel, const float *values, vec out[VN]) {
    int64_t left = linear->n - panel * NR;
    for (int v = 0; v < VN; v++) out[v] = load(values + v * LANES);
    if (linear->bias)
        for (int v = 0; v < VN; v++) out[v] += load(linear->bias + panel * NR + v * LANES);
    return left < NR ? (int)left : NR;
}

INLINE void put_values(float *y, const vec values[VN], int columns) {
    if (columns < NR) memcpy(y, values, columns * sizeof(float));
    else
        for (int v = 0; v < VN; v++) store(y + v * LANES, values[v]);
}

/* Columns first.. of a result. */
typedef struct {
    float *y;
    int64_t stride, first;
} Matrix;

INLINE void put(void *into, const Linear *linear, int64_t row, const int64_t *at, int count, const float *values) {
    Matrix *m = into;
    for (int g = 0; g < count; g++) {
        vec out[VN];
        int columns = with_bias(linear, at[g], values + g * NR, out);
        put_values(m->y + row * m->stride + at[g] * NR - m->first, out, columns);
    }
}

INLINE void add(void *into, const Linear *linear, int64_t row, const int64_t *at, int count, const float *values) {
    Matrix *m = into;
    for (int g = 0; g < count; g++) {
        vec out[VN];
        float *y = m->y + row * m->stride + at[g] * NR - m->first;
        int columns = with_bias(linear, at[g], values + g * NR, out);
        for (int v = 0; v < VN && columns == NR; v++) out[v] += load(y + v * LANES);
        for (int c = 0; c < columns && columns < NR; c++) ((float *)out)[c] += y[c];
        put_values(y, out, columns);
    }
}

/* exp with a relative error below 1e-6, and exactly 0 where it would be subnormal. */
INLINE vec exponential(vec x) {
    vec clipped = choose(x < -87.0f, (vec){0} - 87.0f, choose(x > 88.0f, (vec){0} + 88.0f, x));
    vec shifted = clipped * 1.44269504f + 12582912.0f; /* adding 1.5 * 2^23 rounds to an integer */
    ivec power = ((ivec)shifted << 23) + (127 << 23);
    vec n = shifted - 12582912.0f;
    vec r = clipped - n * 0.693359375f + n * 2.12194440e-4f;
    vec e = 1.9875691500e-4f * r + 1.3981999507e-3f;
    e = e * r + 8.3334519073e-3f;
    e = e * r + 4.1665795894e-2f;
    e = e * r + 1.6666665459e-1f;
    e = e * r + 5.0000001201e-1f;
    e = e * r * r + r + 1.0f;
    return choose(x < -87.0f, (vec){0}, e * (vec)power);
}
