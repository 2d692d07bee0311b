/* Products of a few rows with packed weights, and the vector helpers that the forward shares.

   Weights [n, k] are packed in panels of NR outputs: panel p holds w[p * NR + c][i] at (p * k + i) * NR + c, the last
   panel padded with zeros. An output is one chain of multiply-adds over i in ascending order whatever the number of
   rows, so a row's result does not depend on who shares the batch. */
#pragma once
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef __AVX512F__
#define LANES 16
#else
#define LANES 8
#endif
#define NR 16
#define VN (NR / LANES)
#define MAX_TILE 6
#define PANELS_A_BLOCK 4 /* their weights stay in the second-level cache while row tiles pass */
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float loose __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));

enum kind { FP32, FP16 };

typedef struct {
    const void *weight;
    const float *bias; /* or null */
    int64_t n, k, kind;
} Linear;

INLINE vec load(const float *at) { return *(const loose *)at; }
INLINE void store(float *at, vec x) { *(loose *)at = x; }

INLINE vec choose(ivec where, vec yes, vec no) { return (vec)((where & (ivec)yes) | (~where & (ivec)no)); }

INLINE float total(vec x) {
    float sum = 0;
    for (int i = LANES / 2; i; i /= 2)
        for (int j = 0; j < i; j++) x[j] += x[j + i];
    return sum + x[0];
}

INLINE void load_weights(const void *panel, int64_t kind, int64_t i, vec w[VN]) {
    if (kind == FP32) {
        for (int v = 0; v < VN; v++) w[v] = load((const float *)panel + i * NR + v * LANES);
        return;
    }
    const uint16_t *at = (const uint16_t *)panel + i * NR;
#ifdef __AVX512F__
    w[0] = (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)at));
#else
    for (int v = 0; v < VN; v++) w[v] = (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(at + v * LANES)));
#endif
}

INLINE const void *panel_at(const Linear *linear, int64_t p) {
    return (const char *)linear->weight + p * linear->k * NR * (linear->kind == FP32 ? 4 : 2);
}

/* out [rows][panels * NR] = x [rows, k] times `panels` neighbouring panels. */
INLINE void tile(int rows, int panels, const Linear *linear, int64_t kind, int64_t p, const float *x, int64_t stride,
                 float *out) {
    vec sum[MAX_TILE * 2 * VN];
    const void *panel[2] = {panel_at(linear, p), panel_at(linear, p + panels - 1)};
    for (int i = 0; i < rows * panels * VN; i++) sum[i] = (vec){0};
    for (int64_t i = 0; i < linear->k; i++) {
        for (int q = 0; q < panels; q++) {
            vec w[VN];
            load_weights(panel[q], kind, i, w);
            for (int r = 0; r < rows; r++)
                for (int v = 0; v < VN; v++) sum[(r * panels + q) * VN + v] += x[r * stride + i] * w[v];
        }
    }
    for (int i = 0; i < rows * panels * VN; i++) store(out + i * LANES, sum[i]);
}

#define TILES(KIND)                                                            \
    switch (rows * 2 + panels - 1) {                                           \
    case 2: tile(1, 1, linear, KIND, p, x, stride, out); return;               \
    case 3: tile(1, 2, linear, KIND, p, x, stride, out); return;               \
    case 4: tile(2, 1, linear, KIND, p, x, stride, out); return;               \
    case 5: tile(2, 2, linear, KIND, p, x, stride, out); return;               \
    case 6: tile(3, 1, linear, KIND, p, x, stride, out); return;               \
    case 8: tile(4, 1, linear, KIND, p, x, stride, out); return;               \
    case 10: tile(5, 1, linear, KIND, p, x, stride, out); return;              \
    default: tile(6, 1, linear, KIND, p, x, stride, out); return;              \
    }

/* One or, with at most two rows, two panels: few rows need more chains to fill the pipeline. */
static void run_tile(int rows, int panels, const Linear *linear, int64_t p, const float *x, int64_t stride,
                     float *out) {
    if (linear->kind == FP32) TILES(FP32)
    TILES(FP16)
}

typedef void Emit(void *into, int64_t row, int64_t column, int count, const float *values);

/* Panels [first, last) of x [rows, k] times the weights; `emit` gets NR columns of a row at a time. */
INLINE void panels(const Linear *linear, const float *x, int64_t rows, int64_t first, int64_t last, Emit *emit,
                   void *into) {
    float out[MAX_TILE * 2 * NR];
    int64_t tiles = (rows + MAX_TILE - 1) / MAX_TILE;
    for (int64_t block = first; block < last; block += PANELS_A_BLOCK) {
        int64_t end = block + PANELS_A_BLOCK < last ? block + PANELS_A_BLOCK : last;
        for (int64_t t = 0; t < tiles; t++) {
            int64_t row = rows * t / tiles, count = rows * (t + 1) / tiles - row;
            for (int64_t p = block, wide; p < end; p += wide) {
                wide = count <= 2 && p + 1 < end ? 2 : 1;
                run_tile((int)count, (int)wide, linear, p, x + row * linear->k, linear->k, out);
                for (int64_t r = 0; r < count; r++)
                    for (int64_t q = 0; q < wide; q++) {
                        float *values = out + (r * wide + q) * NR;
                        int64_t column = (p + q) * NR, left = linear->n - column;
                        if (linear->bias)
                            for (int c = 0; c < NR && c < left; c++) values[c] += linear->bias[column + c];
                        emit(into, row + r, column, left < NR ? (int)left : NR, values);
                    }
            }
        }
    }
}

/* Columns first.. of a result. */
typedef struct {
    float *y;
    int64_t stride, first;
} Matrix;

INLINE void put(void *into, int64_t row, int64_t column, int count, const float *values) {
    Matrix *m = into;
    memcpy(m->y + row * m->stride + column - m->first, values, count * sizeof(float));
}

INLINE void add(void *into, int64_t row, int64_t column, int count, const float *values) {
    Matrix *m = into;
    float *y = m->y + row * m->stride + column - m->first;
    for (int c = 0; c < count; c++) y[c] += values[c];
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
