/* Attention of a batch: in chunks of fixed positions that are combined in order, so that a row's result depends on its own
   history alone. Here by vectors; by tiles in attention_tiles.h. */
#pragma once

/* The totals of LANES vectors, as the lanes of one: neighbours `width` apart are added, then half as far, and so on. */
INLINE vec totals(vec *x) {
    const ivec lane =
#if LANES == 16
        {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#else
        {0, 1, 2, 3, 4, 5, 6, 7};
#endif
#pragma GCC unroll 4
    for (int width = LANES / 2; width; width /= 2) {
        ivec from = lane + (ivec)((lane & width) != 0) * (width - LANES); /* true is -1 */
        for (int i = 0; i < width; i++)
            x[i] = __builtin_shuffle(x[i], x[i + width], from) + __builtin_shuffle(x[i], x[i + width], from + width);
    }
    return x[0];
}

#define HEADS 3 /* query heads of one KV head that pass over its keys together */
#define ROWS 8  /* and rows; each block of keys and values is fetched once for all of them */

/* Up to ROWS rows of one sequence, HEADS heads and CHUNK positions. */
typedef struct {
    const float *q, *keys, *values;
    float *out; /* of each row and head [max, sum, values [d]] */
    int64_t row_stride, head_stride, q_stride, from, rows, n[ROWS]; /* n: positions that a row sees, from `from` on */
} Piece;

static void softmax(float *score, int64_t n, float *out) {
    for (int64_t j = n; j < n + LANES; j++) score[j] = -INFINITY;
    vec mass = {0}, largest = load(score);
    for (int64_t j = LANES; j < n; j += LANES) largest = choose(load(score + j) > largest, load(score + j), largest);
    float most = largest[0];
    for (int l = 1; l < LANES; l++) most = largest[l] > most ? largest[l] : most;
    for (int64_t j = 0; j < n; j += LANES) {
        vec e = exponential(load(score + j) - most);
        store(score + j, e);
        mass += e;
    }
    out[0] = most;
    out[1] = total(mass);
}

INLINE void score_keys(int heads, const Piece *p, int64_t row, int64_t j, int64_t d, float scale, float *score) {
    const float *q = p->q + row * p->q_stride;
    vec sum[HEADS][LANES];
    for (int l = 0; l < LANES; l++) {
        const float *key = p->keys + (p->from + (j + l < p->n[row] ? j + l : j)) * d;
        for (int h = 0; h < heads; h++) sum[h][l] = load(q + h * d) * load(key);
        for (int64_t i = LANES; i < d; i += LANES)
            for (int h = 0; h < heads; h++) sum[h][l] += load(q + h * d + i) * load(key + i);
    }
    for (int h = 0; h < heads; h++) store(score + h * (CHUNK + LANES) + j, totals(sum[h]) * scale);
}

INLINE void add_values(int heads, const Piece *p, int64_t row, int64_t j, int64_t d, const float *score) {
    int64_t end = j + LANES < p->n[row] ? j + LANES : p->n[row];
    float *out = p->out + row * p->row_stride + 2;
    for (int64_t i = 0; i < d; i += 4 * LANES) {
        int64_t width = d - i < 4 * LANES ? (d - i) / LANES : 4;
        vec sum[HEADS][4];
        for (int h = 0; h < heads; h++)
            for (int64_t v = 0; v < width; v++) sum[h][v] = load(out + h * p->head_stride + i + v * LANES);
        for (int64_t at = j; at < end; at++)
            for (int64_t v = 0; v < width; v++) {
                vec value = load(p->values + (p->from + at) * d + i + v * LANES);
                for (int h = 0; h < heads; h++) sum[h][v] += score[h * (CHUNK + LANES) + at] * value;
            }
        for (int h = 0; h < heads; h++)
            for (int64_t v = 0; v < width; v++) store(out + h * p->head_stride + i + v * LANES, sum[h][v]);
    }
}

/* Softmax-weighted sums of values; a block of keys passes all rows before the next one comes. */
INLINE void attend(int heads, const Piece *p, int64_t d, float scale) {
    float score[ROWS][HEADS * (CHUNK + LANES)];
    int64_t longest = p->n[p->rows - 1];
    for (int64_t j = 0; j < longest; j += LANES)
        for (int64_t r = 0; r < p->rows; r++)
            if (j < p->n[r]) score_keys(heads, p, r, j, d, scale, score[r]);
    for (int64_t r = 0; r < p->rows; r++)
        for (int h = 0; h < heads; h++) {
            float *out = p->out + r * p->row_stride + h * p->head_stride;
            softmax(score[r] + h * (CHUNK + LANES), p->n[r], out);
            memset(out + 2, 0, d * sizeof(float));
        }
    for (int64_t j = 0; j < longest; j += LANES)
        for (int64_t r = 0; r < p->rows; r++)
            if (j < p->n[r]) add_values(heads, p, r, j, d, score[r]);
}

/* Chunk c of the heads h.. for all rows of a span. */
static void attend_span(const Model *m, const Batch *batch, const Buffers *b, const Span *span, int64_t at, int64_t h,
                        int heads, int64_t c) {
    int64_t d = m->head_dim, end = span->start + span->count, from = c * CHUNK;
    int64_t head_stride = batch->chunks * (d + 2), first = 0;
    float scale = 1.0f / sqrtf((float)d);
    if (!batch->context && from > span->start) first = from - span->start; /* rows before see nothing of this chunk */
    for (int64_t row; first < span->count; first += ROWS) {
        row = span->first + first;
        Piece piece = {
            .q = b->q + (row * m->heads + h) * d,
            .keys = span->keys + at,
            .values = span->values + at,
            .out = b->partial + (row * m->heads + h) * head_stride + c * (d + 2),
            .row_stride = m->heads * head_stride,
            .head_stride = head_stride,
            .q_stride = m->heads * d,
            .from = from,
            .rows = span->count - first < ROWS ? span->count - first : ROWS,
        };
        for (int64_t r = 0; r < piece.rows; r++) {
            int64_t seen = (batch->context ? end : span->start + first + r + 1) - from;
            piece.n[r] = seen < CHUNK ? seen : CHUNK;
        }
        if (heads == 3) attend(3, &piece, d, scale);
        else if (heads == 2) attend(2, &piece, d, scale);
        else attend(1, &piece, d, scale);
    }
}

#ifdef __AMX_BF16__
#include "attention_tiles.h"
#else
static void attend_prompt(const Model *m, const Batch *batch, const Buffers *b, int64_t layer, int thread, int threads) {}
static void attend_window(const Model *m, const Batch *batch, const Buffers *b, const Span *span, int64_t at, int64_t kv,
                          int64_t c) {}
#endif

/* All (KV head, chunk) of the batch, dealt out so that neighbours share keys in the cache. A draft's few keys are not worth
   tiles. */
static void attend_all(const Model *m, const Batch *batch, const Buffers *b, int64_t layer, int thread, int threads) {
    int64_t group = m->heads / m->kv_heads, item = 0, by_tiles = tiles_ready() && !batch->context && !(m->head_dim % BLOCK);
    for (int64_t s = 0; s < batch->spans; s++) {
        const Span *span = batch->span + s;
        for (int64_t c = 0; c * CHUNK < span->start + span->count; c++)
            for (int64_t kv = 0; kv < m->kv_heads; kv++) {
                int64_t at = layer * span->layer_stride + kv * span->head_stride;
                if (by_tiles && item++ % threads == thread) attend_window(m, batch, b, span, at, kv, c);
                for (int64_t h = 0; h < group && !by_tiles; h += HEADS) {
                    int heads = group - h < HEADS ? (int)(group - h) : HEADS;
                    if (item++ % threads == thread) attend_span(m, batch, b, span, at, kv * group + h, heads, c);
                }
            }
    }
}

/* Attention's output [rows, heads * head_dim], from the chunks in ascending order. */
static void combine(const Model *m, const Batch *batch, const Buffers *b) {
    int64_t d = m->head_dim;
    for (int64_t row = 0; row < batch->rows; row++) {
        const Span *span = span_of(batch, row);
        int64_t chunks = batch->context ? 1 : (span->start + row - span->first) / CHUNK + 1;
        for (int64_t h = 0; h < m->heads; h++) {
            const float *part = b->partial + (row * m->heads + h) * batch->chunks * (d + 2);
            float *out = b->mixed + (row * m->heads + h) * d, most = -INFINITY, mass = 0;
            for (int64_t c = 0; c < chunks; c++)
                if (part[c * (d + 2)] > most) most = part[c * (d + 2)];
            memset(out, 0, d * sizeof(float));
            for (int64_t c = 0; c < chunks; c++) {
                const float *p = part + c * (d + 2);
                float weight = expf(p[0] - most);
                mass += weight * p[1];
                for (int64_t i = 0; i < d; i++) out[i] += weight * p[2 + i];
            }
            for (int64_t i = 0; i < d; i++) out[i] /= mass;
        }
    }
}
