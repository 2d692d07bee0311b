/* A DLite draft in one call: the parallel backbone, then the recurrent head, greedily, one step a token. */
#include "decoder.h"

typedef struct {
    Linear state, from_state, from_hidden, output;
    int64_t rank;
    const float *embedding; /* [vocab, rank] */
    const int64_t *vocab;   /* output row -> token id, or null where they are the same */
} Head;

typedef struct {
    Batch batch; /* a span an anchor: its last real tokens and the placeholders, behind the context */
    int64_t steps, placeholders;
    const int64_t *anchor, *seed; /* [spans]; seed: the token before the anchor, or null */
    int64_t *ids;                 /* [spans, steps] */
    float *sure;                  /* [spans, steps]: the head's probability of each id */
    float *head_scratch;
} Draft;

#define BEST 3 /* of a row: the largest value, its output, and the sum of exp(value - largest) */

int64_t dlite_draft_scratch(const Head *head, int64_t spans, int64_t steps, int64_t hidden, int64_t threads) {
    int64_t r = head->rank;
    int64_t own = spans * (2 * r + steps * hidden) + input_size(spans * steps, hidden > 2 * r ? hidden : 2 * r);
    return spans * (2 * r + r + steps * r + BEST * threads) + threads * own;
}

typedef struct {
    float *gates, *mixed, *from_hidden, *best; /* shared: [spans, 2r], [spans, r], [spans, steps, r], [threads, spans, BEST] */
    float *joined, *hidden, *input;            /* a thread's own: [spans, 2r] state and embedding, [spans, steps, H] */
} HeadBuffers;

static HeadBuffers head_buffers(const Model *m, const Head *head, const Draft *draft, int thread, int threads) {
    int64_t n = draft->batch.spans, r = head->rank;
    HeadBuffers b = {.gates = draft->head_scratch};
    b.mixed = b.gates + n * 2 * r;
    b.from_hidden = b.mixed + n * r;
    b.best = b.from_hidden + n * draft->steps * r;
    int64_t own = n * (2 * r + draft->steps * m->hidden);
    own += input_size(n * draft->steps, m->hidden > 2 * r ? m->hidden : 2 * r);
    b.joined = b.best + threads * n * BEST + thread * own;
    b.hidden = b.joined + n * 2 * r;
    b.input = b.hidden + n * draft->steps * m->hidden;
    return b;
}

static void product(const Linear *linear, const HeadBuffers *b, const float *x, int64_t rows, float *y, int thread,
                    int threads) {
    int64_t columns = panels_of(linear);
    Matrix into = {y, linear->n, 0};
    Input in = prepare(linear, x, rows, b->input);
    panels(linear, &in, columns * thread / threads, columns * (thread + 1) / threads, put, &into);
}

/* state' = sigmoid(g) * state + (1 - sigmoid(g)) * tanh(c), where [g, c] = state_proj [state, embedding of id]. */
static void advance(const Head *head, const Draft *draft, HeadBuffers *b, const int64_t *id, int64_t stride,
                    Barrier *barrier, int thread, int threads) {
    int64_t r = head->rank, n = draft->batch.spans;
    for (int64_t i = 0; i < n; i++)
        memcpy(b->joined + i * 2 * r + r, head->embedding + id[i * stride] * r, r * sizeof(float));
    product(&head->state, b, b->joined, n, b->gates, thread, threads);
    meet(barrier, threads);
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < r; j += LANES) {
            vec keep = 1.0f / (1.0f + exponential(-load(b->gates + i * 2 * r + j)));
            vec new = 1.0f - 2.0f / (1.0f + exponential(2.0f * load(b->gates + i * 2 * r + r + j)));
            float *state = b->joined + i * 2 * r + j;
            store(state, keep * load(state) + (1.0f - keep) * new);
        }
}

typedef struct {
    float *best; /* [spans, BEST] */
} Best;

INLINE void largest(void *into, const Linear *linear, int64_t row, const int64_t *at, int count, const float *values) {
    float *best = ((Best *)into)->best + row * BEST, before = best[0];
    vec out[GROUP * VN], mass = {0};
    for (int g = 0; g < count; g++) {
        int columns = with_bias(linear, at[g], values + g * NR, out + g * VN);
        for (int c = 0; c < NR; c++) {
            float *value = (float *)(out + g * VN) + c;
            int32_t found = (int32_t)(at[g] * NR + c);
            if (c >= columns) *value = -INFINITY;
            if (*value <= best[0]) continue;
            best[0] = *value;
            memcpy(best + 1, &found, sizeof found);
        }
    }
    for (int v = 0; v < count * VN; v++) mass += exponential(out[v] - best[0]);
    best[2] = total(mass) + (best[2] > 0 ? best[2] * expf(before - best[0]) : 0);
}

/* ids[:, step] = the likeliest token after the present state, and how likely it is. */
static void step_head(const Head *head, const Draft *draft, HeadBuffers *b, int64_t step, Barrier *barrier, int thread,
                      int threads) {
    int64_t r = head->rank, n = draft->batch.spans, outputs = panels_of(&head->output), columns = (r + NR - 1) / NR;
    Matrix mixed = {b->mixed, r, 0};
    float state[n * r];
    for (int64_t i = 0; i < n; i++) memcpy(state + i * r, b->joined + i * 2 * r, r * sizeof(float));
    int64_t first = columns * thread / threads, last = columns * (thread + 1) / threads;
    Input in = prepare(&head->from_state, state, n, b->input);
    panels(&head->from_state, &in, first, last, put, &mixed);
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = first * NR; j < last * NR && j < r; j++)
            b->mixed[i * r + j] += b->from_hidden[(i * draft->steps + step) * r + j];
    Best best = {b->best + thread * n * BEST};
    for (int64_t i = 0; i < n; i++) best.best[i * BEST] = -INFINITY, best.best[i * BEST + 2] = 0;
    meet(barrier, threads);
    in = prepare(&head->output, b->mixed, n, b->input);
    panels(&head->output, &in, outputs * thread / threads, outputs * (thread + 1) / threads, largest, &best);
    meet(barrier, threads);
    if (thread == 0)
        for (int64_t i = 0; i < n; i++) {
            const float *of_threads = b->best + i * BEST, *found = of_threads;
            for (int t = 1; t < threads; t++)
                if (of_threads[t * n * BEST] > found[0]) found = of_threads + t * n * BEST;
            float mass = 0;
            for (int t = 0; t < threads; t++)
                if (of_threads[t * n * BEST + 2] > 0)
                    mass += of_threads[t * n * BEST + 2] * expf(of_threads[t * n * BEST] - found[0]);
            draft->sure[i * draft->steps + step] = 1 / mass;
            int32_t row;
            memcpy(&row, found + 1, sizeof row);
            draft->ids[i * draft->steps + step] = head->vocab ? head->vocab[row] : row;
        }
    meet(barrier, threads);
}

static void run(const Model *m, const Head *head, const Draft *draft, Barrier *barrier, int thread, int threads) {
    const Batch *batch = &draft->batch;
    Buffers body = buffers_of(m, batch, thread);
    for (int64_t l = 0; l < m->layers; l++) run_layer(m, batch, &body, l, barrier, thread, threads);
    HeadBuffers b = head_buffers(m, head, draft, thread, threads);
    int64_t n = batch->spans;
    for (int64_t i = 0; i < n; i++) {
        const Span *span = batch->span + i;
        const float *x = batch->x + (span->first + span->count - draft->placeholders) * m->hidden;
        for (int64_t k = 0; k < draft->steps; k++)
            norm(b.hidden + (i * draft->steps + k) * m->hidden, x + k * m->hidden, m->final_norm, m->hidden, m->eps);
        memset(b.joined + i * 2 * head->rank, 0, head->rank * sizeof(float));
    }
    product(&head->from_hidden, &b, b.hidden, n * draft->steps, b.from_hidden, thread, threads);
    if (draft->seed) {
        advance(head, draft, &b, draft->seed, 1, barrier, thread, threads);
        meet(barrier, threads);
    }
    for (int64_t k = 0; k < draft->steps; k++) {
        const int64_t *previous = k ? draft->ids + k - 1 : draft->anchor;
        advance(head, draft, &b, previous, k ? draft->steps : 1, barrier, thread, threads);
        step_head(head, draft, &b, k, barrier, thread, threads);
    }
    tiles_done();
}

void dlite_draft(const Model *model, const Head *head, const Draft *draft, int threads) {
    Barrier barrier = {0};
#pragma omp parallel num_threads(threads)
    run(model, head, draft, &barrier, omp_get_thread_num(), omp_get_num_threads());
}
