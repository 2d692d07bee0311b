/* One decoder layer for a few rows, run by all threads of a parallel region with five barriers.

   What torch spends on thousands of small operations is more than the products themselves at these sizes. Attention is
   computed in chunks of fixed positions that are combined in order, so that, as in linear.h, a row's result depends on
   its own history alone. The drafter's layers are the same, but its rows see each other both ways, and S context
   vectors that are only keys and values. */
#pragma once
#include "linear.h"
#include <omp.h>
#include <sched.h>
#include <stdatomic.h>

#define CHUNK 256
#define SPINS 4000 /* about 100 us of waiting before a thread lets others run */

typedef struct {
    Linear qkv, o, gate_up, down;
    const float *input_norm, *post_norm, *q_norm, *k_norm; /* the last two may be null */
} Layer;

typedef struct {
    int64_t layers, hidden, heads, kv_heads, head_dim, inner;
    float eps;
    const Layer *layer;
    Linear head;
    const float *final_norm, *cos, *sin; /* tables [positions, head_dim] */
} Model;

/* Rows [first, first + count) of the batch are positions start.. of one sequence, or of one drafter block behind its
   context, whose vectors are rotated for position context_at; a block's own positions count from 0.
   Keys and values of layer l: + l * layer_stride, [kv_heads, head_stride / head_dim, head_dim]. */
typedef struct {
    float *keys, *values;
    int64_t layer_stride, head_stride, first, count, start, context_at;
} Span;

typedef struct {
    int64_t rows, spans, chunks; /* chunks: of the longest span */
    const Span *span;
    float *x; /* [rows, hidden]: embeddings on entry */
    float *scratch;
    int64_t context_rows;
    const float *context; /* [spans, context_rows, hidden], or null */
} Batch;

typedef struct {
    atomic_int arrived, round;
} Barrier;

static void meet(Barrier *barrier, int threads) {
    int round = atomic_load_explicit(&barrier->round, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&barrier->arrived, 1, memory_order_acq_rel) == threads - 1) {
        atomic_store_explicit(&barrier->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&barrier->round, round + 1, memory_order_release);
        return;
    }
    for (int64_t spins = 0; atomic_load_explicit(&barrier->round, memory_order_acquire) == round; spins++) {
        if (spins < SPINS) _mm_pause();
        else sched_yield();
    }
}

typedef struct {
    float *x, *q, *act, *partial, *normed, *mixed; /* the last two are a thread's own */
} Buffers;

static int64_t partial_size(const Model *m, int64_t rows, int64_t chunks) {
    return rows * m->heads * chunks * (m->head_dim + 2);
}

/* Floats of scratch a batch needs. */
INLINE int64_t scratch_size(const Model *m, int64_t rows, int64_t chunks, int64_t threads) {
    int64_t width = m->heads * m->head_dim;
    return rows * (width + m->inner) + partial_size(m, rows, chunks) + threads * rows * (m->hidden + width);
}

static Buffers buffers_of(const Model *m, const Batch *batch, int thread) {
    int64_t rows = batch->rows, width = m->heads * m->head_dim;
    Buffers b = {.x = batch->x, .q = batch->scratch};
    b.act = b.q + rows * width;
    b.partial = b.act + rows * m->inner;
    b.normed = b.partial + partial_size(m, rows, batch->chunks) + thread * rows * (m->hidden + width);
    b.mixed = b.normed + rows * m->hidden;
    return b;
}

static void norm(float *y, const float *x, const float *weight, int64_t n, float eps) {
    vec sum = {0};
    for (int64_t i = 0; i < n; i += LANES) sum += load(x + i) * load(x + i);
    float scale = 1.0f / sqrtf(total(sum) / n + eps);
    for (int64_t i = 0; i < n; i += LANES) store(y + i, load(x + i) * scale * load(weight + i));
}

static void rotate(float *y, const float *x, const float *cos, const float *sin, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] = x[i] * cos[i] + x[i < n / 2 ? i + n / 2 : i - n / 2] * sin[i];
}

static const Span *span_of(const Batch *batch, int64_t row) {
    const Span *span = batch->span;
    while (row >= span->first + span->count) span++;
    return span;
}

/* Norm, rotate and put one finished head where attention reads it: `slot` of the span's keys or values, or q. */
static void place(const Model *m, const Layer *layer, int64_t l, const Span *span, int64_t head, int64_t slot,
                  int64_t position, float *x, float *q) {
    int64_t d = m->head_dim, kv = head - m->heads;
    if (kv >= m->kv_heads) {
        int64_t at = l * span->layer_stride + (kv - m->kv_heads) * span->head_stride + slot * d;
        memcpy(span->values + at, x, d * sizeof(float));
        return;
    }
    const float *weight = kv < 0 ? layer->q_norm : layer->k_norm;
    if (weight) norm(x, x, weight, d, m->eps);
    float *to = kv < 0 ? q : span->keys + l * span->layer_stride + kv * span->head_stride + slot * d;
    rotate(to, x, m->cos + position * d, m->sin + position * d, d);
}

/* One head of q, k or v of all rows. */
static void project_rows(const Model *m, const Batch *batch, const Buffers *b, int64_t l, int64_t head) {
    int64_t d = m->head_dim, a_head = d / NR;
    Matrix into = {b->mixed, d, head * d};
    panels(&m->layer[l].qkv, b->normed, batch->rows, head * a_head, (head + 1) * a_head, put, &into);
    for (int64_t row = 0; row < batch->rows; row++) {
        const Span *span = span_of(batch, row);
        int64_t slot = span->start + row - span->first;
        float *q = b->q + (row * m->heads + head) * d;
        place(m, m->layer + l, l, span, head, slot, slot - batch->context_rows, b->mixed + row * d, q);
    }
}

/* One head of k or v of the context vectors. */
static void project_context(const Model *m, const Batch *batch, const Buffers *b, int64_t l, int64_t head) {
    int64_t d = m->head_dim, a_head = d / NR, count = batch->context_rows;
    for (int64_t s = 0; s < batch->spans; s++) {
        Matrix into = {b->mixed, d, head * d};
        const float *context = batch->context + s * count * m->hidden;
        panels(&m->layer[l].qkv, context, count, head * a_head, (head + 1) * a_head, put, &into);
        for (int64_t i = 0; i < count; i++)
            place(m, m->layer + l, l, batch->span + s, head, i, batch->span[s].context_at, b->mixed + i * d, 0);
    }
}

/* Softmax-weighted sum of one query head over positions [from, to): out = [max, sum, values [d]]. */
static void attend(float *out, const float *q, const float *keys, const float *values, int64_t from, int64_t to,
                   int64_t d, float scale) {
    float score[CHUNK + LANES];
    int64_t n = to - from;
    float most = -INFINITY;
    for (int64_t j = 0; j < n; j++) {
        const float *key = keys + (from + j) * d;
        vec sum = {0};
        for (int64_t i = 0; i < d; i += LANES) sum += load(q + i) * load(key + i);
        score[j] = total(sum) * scale;
        if (score[j] > most) most = score[j];
    }
    for (int64_t j = n; j < n + LANES; j++) score[j] = -INFINITY;
    vec mass = {0};
    for (int64_t j = 0; j < n; j += LANES) {
        vec e = exponential(load(score + j) - most);
        store(score + j, e);
        mass += e;
    }
    out[0] = most;
    out[1] = total(mass);
    for (int64_t i = 0; i < d; i += 4 * LANES) {
        int64_t width = d - i < 4 * LANES ? (d - i) / LANES : 4;
        vec sum[4] = {{0}};
        for (int64_t j = 0; j < n; j++)
            for (int64_t v = 0; v < width; v++) sum[v] += score[j] * load(values + (from + j) * d + i + v * LANES);
        for (int64_t v = 0; v < width; v++) store(out + 2 + i + v * LANES, sum[v]);
    }
}

/* All (row, KV head, chunk) of the batch, dealt out so that neighbours share keys in the cache. */
static void attend_all(const Model *m, const Batch *batch, const Buffers *b, int64_t layer, int thread, int threads) {
    int64_t d = m->head_dim, group = m->heads / m->kv_heads, item = 0;
    float scale = 1.0f / sqrtf((float)d);
    for (int64_t s = 0; s < batch->spans; s++) {
        const Span *span = batch->span + s;
        int64_t end = span->start + span->count;
        for (int64_t c = 0; c * CHUNK < end; c++)
            for (int64_t kv = 0; kv < m->kv_heads; kv++) {
                int64_t at = layer * span->layer_stride + kv * span->head_stride;
                for (int64_t h = kv * group; h < (kv + 1) * group; h++) {
                    if (item++ % threads != thread) continue;
                    for (int64_t row = span->first; row < span->first + span->count; row++) {
                        int64_t from = c * CHUNK, to = batch->context ? end : span->start + row - span->first + 1;
                        if (to > from + CHUNK) to = from + CHUNK;
                        if (to <= from) continue;
                        float *out = b->partial + ((row * m->heads + h) * batch->chunks + c) * (d + 2);
                        attend(out, b->q + (row * m->heads + h) * d, span->keys + at, span->values + at, from, to, d,
                               scale);
                    }
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

static void gate(float *act, const Model *m, const Linear *linear, const float *x, int64_t rows, int64_t p) {
    float buffer[2 * 64 * NR];
    int64_t half = m->inner / NR;
    for (int64_t first = 0; first < rows; first += 64) {
        int64_t count = rows - first < 64 ? rows - first : 64;
        for (int64_t side = 0; side < 2; side++) {
            Matrix into = {buffer + side * 64 * NR, NR, (p + side * half) * NR};
            panels(linear, x + first * m->hidden, count, p + side * half, p + side * half + 1, put, &into);
        }
        for (int64_t r = 0; r < count; r++)
            for (int64_t c = 0; c < NR; c += LANES) {
                vec g = load(buffer + r * NR + c), up = load(buffer + (64 + r) * NR + c);
                store(act + (first + r) * m->inner + p * NR + c, g / (1.0f + exponential(-g)) * up);
            }
    }
}

static void normalise(const Model *m, const Batch *batch, const Buffers *b, const float *weight) {
    for (int64_t r = 0; r < batch->rows; r++)
        norm(b->normed + r * m->hidden, b->x + r * m->hidden, weight, m->hidden, m->eps);
}

/* x becomes the layer's output; all threads call this together. */
static void run_layer(const Model *m, const Batch *batch, const Buffers *b, int64_t l, Barrier *barrier, int thread,
                      int threads) {
    const Layer *layer = m->layer + l;
    Matrix x = {b->x, m->hidden, 0};
    int64_t heads = m->heads + 2 * m->kv_heads, items = heads + (batch->context ? 2 * m->kv_heads : 0);
    normalise(m, batch, b, layer->input_norm);
    for (int64_t i = items * thread / threads; i < items * (thread + 1) / threads; i++)
        if (i < heads) project_rows(m, batch, b, l, i);
        else project_context(m, batch, b, l, i - 2 * m->kv_heads);
    meet(barrier, threads);
    attend_all(m, batch, b, l, thread, threads);
    meet(barrier, threads);
    combine(m, batch, b);
    int64_t columns = (m->hidden + NR - 1) / NR;
    int64_t first = columns * thread / threads, last = columns * (thread + 1) / threads;
    panels(&layer->o, b->mixed, batch->rows, first, last, add, &x);
    meet(barrier, threads);
    normalise(m, batch, b, layer->post_norm);
    int64_t inner = m->inner / NR;
    for (int64_t p = inner * thread / threads; p < inner * (thread + 1) / threads; p++)
        gate(b->act, m, &layer->gate_up, b->normed, batch->rows, p);
    meet(barrier, threads);
    panels(&layer->down, b->act, batch->rows, first, last, add, &x);
    meet(barrier, threads);
}
