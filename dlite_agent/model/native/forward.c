/* The target's forward, single products, and masks of logits. */
#include "decoder.h"

typedef struct {
    Batch batch;
    int64_t taps, wanted;
    const int64_t *tap_layer, *wanted_row;
    float *tapped; /* [wanted, taps, hidden] */
    float *logits; /* [wanted, vocab] */
} Pass;

int64_t dlite_scratch(const Model *m, int64_t rows, int64_t context, int64_t chunks, int64_t threads) {
    return scratch_size(m, rows, context, chunks, threads);
}

/* Whether `Batch.prompt` may be set. */
int dlite_prompts(void) { return tiles_ready(); }

static void run(const Model *m, const Pass *pass, Barrier *barrier, int thread, int threads) {
    Buffers b = buffers_of(m, &pass->batch, thread);
    int64_t tapped = 0, width = m->hidden * sizeof(float);
    for (int64_t l = 0; l < m->layers; l++) {
        run_layer(m, &pass->batch, &b, l, barrier, thread, threads);
        if (tapped == pass->taps || pass->tap_layer[tapped] != l || l == m->layers - 1) continue;
        for (int64_t i = thread; i < pass->wanted; i += threads)
            memcpy(pass->tapped + (i * pass->taps + tapped) * m->hidden, b.x + pass->wanted_row[i] * m->hidden, width);
        tapped++;
    }
    for (int64_t i = 0; i < pass->wanted; i++) {
        float *y = b.normed + i * m->hidden;
        norm(y, b.x + pass->wanted_row[i] * m->hidden, m->final_norm, m->hidden, m->eps);
        if (tapped < pass->taps && thread == 0)
            memcpy(pass->tapped + (i * pass->taps + tapped) * m->hidden, y, width);
    }
    int64_t columns = panels_of(&m->head);
    Matrix logits = {pass->logits, m->head.n, 0};
    Input in = prepare(&m->head, b.normed, pass->wanted, b.input);
    panels(&m->head, &in, columns * thread / threads, columns * (thread + 1) / threads, put, &logits);
    tiles_done();
}

void dlite_forward(const Model *model, const Pass *pass, int threads) {
    Barrier barrier = {0};
#pragma omp parallel num_threads(threads)
    run(model, pass, &barrier, omp_get_thread_num(), omp_get_num_threads());
}

/* Floats of scratch that one product of so many rows needs. */
int64_t dlite_linear_scratch(const Linear *linear, int64_t rows, int64_t threads) {
    return threads * input_size(rows, linear->k);
}

/* y [rows, n] = x [rows, k] times the weights, plus bias. */
void dlite_linear(const Linear *linear, const float *x, float *y, int64_t rows, float *scratch, int threads) {
    Matrix into = {y, linear->n, 0};
    int64_t columns = panels_of(linear);
#pragma omp parallel num_threads(threads)
    {
        int64_t thread = omp_get_thread_num(), count = omp_get_num_threads();
        Input in = prepare(linear, x, rows, scratch + thread * input_size(rows, linear->k));
        panels(linear, &in, columns * thread / count, columns * (thread + 1) / count, put, &into);
        tiles_done();
    }
}

/* Logits [rows, vocab] become -infinity where bit id % 32 of word id / 32 of `allowed` [rows, words] is not set. */
void dlite_mask(float *logits, const uint32_t *allowed, int64_t rows, int64_t vocab, int64_t stride, int64_t words) {
    ivec lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    for (int64_t r = 0; r < rows; r++, logits += stride, allowed += words) {
        for (int64_t id = 0; id + LANES <= vocab; id += LANES) {
            ivec bits = (ivec){0} + (int32_t)(allowed[id / 32] >> id % 32);
            store(logits + id, choose(-(bits >> lane & 1), load(logits + id), (vec){0} - INFINITY));
        }
        for (int64_t id = vocab / LANES * LANES; id < vocab; id++)
            if (!(allowed[id / 32] >> id % 32 & 1)) logits[id] = -INFINITY;
    }
}
