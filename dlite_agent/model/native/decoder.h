/* One decoder layer, run by all threads of a parallel region between barriers.

   What torch spends on thousands of small operations is more than the products themselves at a few rows. Attention is
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
    int64_t prompt;       /* many rows of one sequence, by tiles (see tiles_ready); heads of whole BLOCKs */
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
    float *x, *q, *act, *partial;
    float *normed, *mixed, *input; /* a thread's own; `input`: what `prepare` needs */
    float *all_normed, *all_input; /* the first thread's, which all share for a prompt */
    float *tiles;                  /* a thread's own, for attention_tiles.h */
} Buffers;

/* Of a prompt: whole tiles of rows, and one chunk. */
static int64_t partial_size(const Model *m, int64_t rows, int64_t chunks) {
    return (rows + TILE_ROWS - 1) * m->heads * chunks * (m->head_dim + 2);
}

static int64_t widest(const Model *m) {
    int64_t width = m->heads * m->head_dim, most = m->hidden > m->inner ? m->hidden : m->inner;
    return width > most ? width : most;
}

/* Floats of `Tiles` in attention_tiles.h. */
static int64_t tiles_size(int64_t d) { return 2 * CHUNK * d + TILE_ROWS * d + 2 * CHUNK * TILE_ROWS + 16; }

static int64_t own_size(const Model *m, int64_t rows, int64_t context) {
    int64_t width = m->heads * m->head_dim;
    return rows * (m->hidden + width) + context * m->head_dim + input_size(rows, widest(m)) +
           input_size(context, m->hidden) + tiles_size(m->head_dim);
}

/* Floats of scratch a batch needs; `context`: rows of context vectors of all spans. */
INLINE int64_t scratch_size(const Model *m, int64_t rows, int64_t context, int64_t chunks, int64_t threads) {
    int64_t shared = rows * (m->heads * m->head_dim + m->inner) + partial_size(m, rows, chunks);
    return shared + threads * own_size(m, rows, context);
}

static Buffers buffers_of(const Model *m, const Batch *batch, int thread) {
    int64_t rows = batch->rows, width = m->heads * m->head_dim, context = batch->context_rows * batch->spans;
    Buffers b = {.x = batch->x, .q = batch->scratch};
    b.act = b.q + rows * width;
    b.partial = b.act + rows * m->inner;
    b.all_normed = b.partial + partial_size(m, rows, batch->chunks);
    b.normed = b.all_normed + thread * own_size(m, rows, context);
    b.mixed = b.normed + rows * m->hidden;
    b.input = b.mixed + rows * width + context * m->head_dim;
    b.all_input = b.input - (b.normed - b.all_normed);
    b.tiles = b.input + input_size(rows, widest(m)) + input_size(context, m->hidden);
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
static void project_rows(const Model *m, const Batch *batch, const Buffers *b, const Input *in, int64_t l, int64_t head) {
    int64_t d = m->head_dim, a_head = d / NR;
    Matrix into = {b->mixed, d, head * d};
    panels(&m->layer[l].qkv, in, head * a_head, (head + 1) * a_head, put, &into);
    for (int64_t row = 0; row < batch->rows; row++) {
        const Span *span = span_of(batch, row);
        int64_t slot = span->start + row - span->first;
        float *q = b->q + (row * m->heads + head) * d;
        place(m, m->layer + l, l, span, head, slot, slot - batch->context_rows, b->mixed + row * d, q);
    }
}

/* One head of k or v of the context vectors of all spans. */
static void project_context(const Model *m, const Batch *batch, const Buffers *b, const Input *in, int64_t l,
                            int64_t head) {
    int64_t d = m->head_dim, a_head = d / NR, count = batch->context_rows;
    Matrix into = {b->mixed, d, head * d};
    panels(&m->layer[l].qkv, in, head * a_head, (head + 1) * a_head, put, &into);
    for (int64_t i = 0; i < batch->spans * count; i++) {
        const Span *span = batch->span + i / count;
        place(m, m->layer + l, l, span, head, i % count, span->context_at, b->mixed + i * d, 0);
    }
}

#include "attention.h"

typedef struct {
    float *act;
    int64_t inner;
} Gated;

/* silu(gate) * up; the first half of the panels are gates, the second the ups that belong to them. */
INLINE void gate(void *into, const Linear *linear, int64_t row, const int64_t *at, int count, const float *values) {
    Gated *to = into;
    for (int p = 0; p < count / 2; p++)
        for (int c = 0; c < NR; c += LANES) {
            vec g = load(values + p * NR + c), up = load(values + (p + count / 2) * NR + c);
            if (linear->bias) g += load(linear->bias + at[p] * NR + c), up += load(linear->bias + at[p + count / 2] * NR + c);
            store(to->act + row * to->inner + at[p] * NR + c, g / (1.0f + exponential(-g)) * up);
        }
}

static void normalise(const Model *m, const Buffers *b, float *to, const float *weight, int64_t first, int64_t last) {
    for (int64_t r = first; r < last; r++) norm(to + r * m->hidden, b->x + r * m->hidden, weight, m->hidden, m->eps);
}

/* Input of a product: `x`, or the layer's x normed by `weight`. Each thread makes its own, but for a prompt, whose rows
   are shared out. */
static Input input_of(const Model *m, const Batch *batch, const Buffers *b, const Linear *linear, const float *x,
                      const float *weight, Barrier *barrier, int thread, int threads) {
    int64_t rows = batch->rows;
    if (!batch->prompt) {
        if (weight) normalise(m, b, b->normed, weight, 0, rows);
        return prepare(linear, weight ? b->normed : x, rows, b->input);
    }
    Input in = prompt_input(linear, weight ? b->all_normed : x, rows, b->all_input, b->input);
    for (int64_t first = thread * TILE_ROWS; first < rows; first += threads * TILE_ROWS) {
        if (weight) normalise(m, b, b->all_normed, weight, first, first + TILE_ROWS < rows ? first + TILE_ROWS : rows);
        if (linear->kind >= BF16) split(&in, first);
    }
    meet(barrier, threads);
    return in;
}

/* x becomes the layer's output; all threads call this together. */
static void run_layer(const Model *m, const Batch *batch, const Buffers *b, int64_t l, Barrier *barrier, int thread,
                      int threads) {
    const Layer *layer = m->layer + l;
    Matrix x = {b->x, m->hidden, 0};
    int64_t heads = m->heads + 2 * m->kv_heads, items = heads + (batch->context ? 2 * m->kv_heads : 0);
    Input in = input_of(m, batch, b, &layer->qkv, 0, layer->input_norm, barrier, thread, threads), context = {0};
    if (batch->context)
        context = prepare(&layer->qkv, batch->context, batch->spans * batch->context_rows,
                          b->input + input_size(batch->rows, widest(m)));
    for (int64_t i = items * thread / threads; i < items * (thread + 1) / threads; i++)
        if (i < heads) project_rows(m, batch, b, &in, l, i);
        else project_context(m, batch, b, &context, l, i - 2 * m->kv_heads);
    meet(barrier, threads);
    if (batch->prompt) attend_prompt(m, batch, b, l, thread, threads);
    else attend_all(m, batch, b, l, thread, threads);
    meet(barrier, threads);
    if (!batch->prompt) combine(m, batch, b);
    int64_t columns = panels_of(&layer->o), first = columns * thread / threads, last = columns * (thread + 1) / threads;
    in = input_of(m, batch, b, &layer->o, batch->prompt ? b->q : b->mixed, 0, barrier, thread, threads);
    panels(&layer->o, &in, first, last, add, &x);
    meet(barrier, threads);
    in = input_of(m, batch, b, &layer->gate_up, 0, layer->post_norm, barrier, thread, threads);
    int64_t inner = m->inner / NR, end = inner * (thread + 1) / threads;
    Gated act = {b->act, m->inner};
    for (int64_t p = inner * thread / threads; p < end; p += GROUP / 2) {
        int half = end - p < GROUP / 2 ? (int)(end - p) : GROUP / 2;
        int64_t at[GROUP];
        for (int i = 0; i < half; i++) at[i] = p + i, at[half + i] = inner + p + i;
        group(&layer->gate_up, &in, at, 2 * half, gate, &act);
    }
    meet(barrier, threads);
    in = input_of(m, batch, b, &layer->down, b->act, 0, barrier, thread, threads);
    panels(&layer->down, &in, first, last, add, &x);
    meet(barrier, threads);
}
