/* Causal attention by tiles. Keys pass in chunks of fixed positions, so that a row's result depends on its own history
   alone; numbers go in as two bf16 halves, and the product of both low ones is left out.

   Scores are transposed, [16 keys, 16 lanes] = K Q^T, so that maxima, sums and masks of softmax are plain vector
   operations. A prompt has 16 rows of one head in the lanes; its values are [16 dims, 16 rows] = V^T P^T, added to those of
   the chunks before. A window has whatever rows and heads share a KV head in its lanes; there are few, so that it is the
   weights that are turned and not the values, and chunks are combined at the end, which lets threads share them. */
#pragma once

/* A thread's memory: a chunk of one KV head's keys [CHUNK / 16][d / 32] and values [CHUNK / 32][d / 16], and the queries
   of 16 lanes [d / 32], all in two tiles of halves; their scores [CHUNK][16] and weights [CHUNK / 32] in halves. */
typedef struct {
    char *keys, *values, *queries, *weights;
    float *scores;
} Tiles;

static Tiles tiles_of(float *memory, int64_t d) {
    Tiles t = {.keys = (char *)aligned(memory)};
    t.values = t.keys + CHUNK * d * 4;
    t.queries = t.values + CHUNK * d * 4;
    t.weights = t.queries + TILE_ROWS * d * 4;
    t.scores = (float *)(t.weights + CHUNK * TILE_ROWS * 4);
    return t;
}

/* 16 x 16 words, rows for columns. */
INLINE void transpose(__m512i x[16]) {
    for (int width = 1; width < 4; width *= 2)
        for (int i = 0; i < 16; i++) {
            if (i & width) continue;
            __m512i a = x[i], b = x[i + width];
            x[i] = width == 1 ? _mm512_unpacklo_epi32(a, b) : _mm512_unpacklo_epi64(a, b);
            x[i + width] = width == 1 ? _mm512_unpackhi_epi32(a, b) : _mm512_unpackhi_epi64(a, b);
        }
    /* x[4 q + p], p with its bits swapped, now holds columns p, p + 4, p + 8 and p + 12 of rows 4 q .. 4 q + 3 */
    __m512i out[16];
    for (int p = 0; p < 4; p++) {
        int i = (p & 1) * 2 + (p >> 1);
        __m512i low = _mm512_shuffle_i32x4(x[i], x[4 + i], 0x44), high = _mm512_shuffle_i32x4(x[i], x[4 + i], 0xee);
        __m512i more = _mm512_shuffle_i32x4(x[8 + i], x[12 + i], 0x44);
        __m512i most = _mm512_shuffle_i32x4(x[8 + i], x[12 + i], 0xee);
        out[p] = _mm512_shuffle_i32x4(low, more, 0x88);
        out[4 + p] = _mm512_shuffle_i32x4(low, more, 0xdd);
        out[8 + p] = _mm512_shuffle_i32x4(high, most, 0x88);
        out[12 + p] = _mm512_shuffle_i32x4(high, most, 0xdd);
    }
    memcpy(x, out, sizeof out);
}

/* Two tiles of halves with rows for columns. */
INLINE void store_turned(char *out, __m512i high[16], __m512i low[16]) {
    transpose(high);
    transpose(low);
    for (int i = 0; i < 16; i++) store_halves(out + i * 64, (Halves){high[i], low[i]});
}

/* 32 rows at `from`, of which n are there: they themselves, or a copy with zeros behind them. */
INLINE const float *padded(const float *from, int64_t n, int64_t d, float *spare) {
    if (n >= 32) return from;
    memcpy(spare, from, n * d * sizeof(float));
    memset(spare + n * d, 0, (32 - n) * d * sizeof(float));
    return spare;
}

/* Keys of n positions, zeros behind them up to whole pairs of tiles: as they are, [16 keys][32 numbers]. */
static void chunk_keys(const float *keys, int64_t n, int64_t d, char *out) {
    float spare[32 * d];
    for (int64_t j = 0; j < n; j += 32) {
        const float *from = padded(keys + j * d, n - j, d, spare);
        for (int64_t r = 0; r < 32; r++)
            for (int64_t i = 0; i < d; i += 32) {
                char *to = out + ((j + r) / 16 * d / 32 + i / 32) * 2 * TILE_BYTES + r % 16 * 64;
                store_halves(to, halves_of(load(from + r * d + i), load(from + r * d + i + LANES)));
            }
    }
}

/* Values of n positions, zeros behind them: [16 pairs of positions][16 dims], or turned, [16 dims][16 pairs]. */
INLINE void chunk_values(const float *values, int64_t n, int64_t d, int turned, char *out) {
    float spare[32 * d];
    for (int64_t j = 0; j < n; j += 32) {
        const float *from = padded(values + j * d, n - j, d, spare);
        for (int64_t i = 0; i < d; i += 16, out += 2 * TILE_BYTES) {
            __m512i high[16], low[16];
            for (int64_t p = 0; p < 16; p++) {
                Halves halves = paired(load(from + 2 * p * d + i), load(from + (2 * p + 1) * d + i));
                if (turned) high[p] = halves.high, low[p] = halves.low;
                else store_halves(out + p * 64, halves);
            }
            if (turned) store_turned(out, high, low);
        }
    }
}

/* The queries q[0 .. lanes): [16 pairs of numbers][16 lanes], zeros for lanes that are not there. */
static void tile_queries(const float *const q[16], int64_t lanes, int64_t d, char *out) {
    for (int64_t i = 0; i < d; i += 32) {
        __m512i high[16], low[16];
        for (int64_t r = 0; r < 16; r++) {
            Halves halves = {_mm512_setzero_si512(), _mm512_setzero_si512()};
            if (r < lanes) halves = halves_of(load(q[r] + i), load(q[r] + i + LANES));
            high[r] = halves.high, low[r] = halves.low;
        }
        store_turned(out + i / 32 * 2 * TILE_BYTES, high, low);
    }
}

/* scores [16 keys, 16 lanes] of `pairs` pairs of key tiles. */
static void score_tiles(const Tiles *t, int64_t pairs, int64_t d) {
    int64_t step = d / 32 * 2 * TILE_BYTES;
    for (int64_t j = 0; j < pairs; j++) {
        _tile_zero(0);
        _tile_zero(1);
        for (int64_t i = 0; i < step; i += 2 * TILE_BYTES) {
            const char *one = t->keys + 2 * j * step + i, *two = one + step;
            _tile_loadd(4, t->queries + i, 64);
            _tile_loadd(6, one, 64);
            _tile_dpbf16ps(0, 6, 4);
            _tile_loadd(2, two, 64);
            _tile_dpbf16ps(1, 2, 4);
            _tile_loadd(7, one + TILE_BYTES, 64);
            _tile_dpbf16ps(0, 7, 4);
            _tile_loadd(3, two + TILE_BYTES, 64);
            _tile_dpbf16ps(1, 3, 4);
            _tile_loadd(5, t->queries + i + TILE_BYTES, 64);
            _tile_dpbf16ps(0, 6, 5);
            _tile_dpbf16ps(1, 2, 5);
        }
        _tile_stored(0, t->scores + 2 * j * 256, 64);
        _tile_stored(1, t->scores + (2 * j + 1) * 256, 64);
    }
}

/* 2^x for x <= 0, with a relative error below 1e-6; 0 for what is too small. */
INLINE vec power(vec x) {
    vec r = _mm512_reduce_ps((__m512)x, 8); /* x less the nearest integer */
    vec e = 1.3333558e-3f * r + 9.6181291e-3f;
    e = e * r + 5.5504109e-2f;
    e = e * r + 2.4022651e-1f;
    e = e * r + 6.9314718e-1f;
    e = e * r + 1.0f;
    return _mm512_scalef_ps((__m512)e, _mm512_roundscale_ps((__m512)x, 8));
}

/* The largest score of each lane, and of `most`; keys beyond a lane's last one become -infinity. */
INLINE vec largest_scores(const Tiles *t, int64_t pairs, vec last, float least_last, vec most) {
    for (int64_t j = least_last < 0 ? 0 : (int64_t)least_last + 1; j < pairs * 32; j++) {
        vec score = load(t->scores + j * 16);
        store(t->scores + j * 16, choose(last < (float)j, (vec){0} - INFINITY, score));
    }
    for (int64_t j = 0; j < pairs * 32; j++) most = _mm512_max_ps((__m512)load(t->scores + j * 16), (__m512)most);
    return most;
}

/* Weights 2^(score * scale - least): [16 pairs of keys][16 lanes], or turned, [16 lanes][16 pairs]; gives their sums. */
INLINE vec soften(const Tiles *t, int64_t pairs, float scale, vec least, int turned) {
    vec mass = {0};
    for (int64_t j = 0; j < pairs; j++) {
        __m512i high[16], low[16];
        char *to = t->weights + j * 2 * TILE_BYTES;
        for (int64_t p = 0; p < 16; p++) {
            const float *score = t->scores + (j * 16 + p) * 32;
            vec even = power(load(score) * scale - least), odd = power(load(score + 16) * scale - least);
            mass += even + odd;
            Halves halves = paired(even, odd);
            if (turned) high[p] = halves.high, low[p] = halves.low;
            else store_halves(to + p * 64, halves);
        }
        if (turned) store_turned(to, high, low);
    }
    return mass;
}

#define TAKE_UP(G) \
    if (count > G) _tile_loadd(G, out + G * 256, 64);
#define WEIGH(G)                                              \
    if (count > G) {                                          \
        _tile_loadd(6, value + G * 2 * TILE_BYTES, 64);       \
        _tile_loadd(7, value + (G * 2 + 1) * TILE_BYTES, 64); \
        if (turned) {                                         \
            _tile_dpbf16ps(G, 4, 6);                          \
            _tile_dpbf16ps(G, 4, 7);                          \
            _tile_dpbf16ps(G, 5, 6);                          \
        } else {                                              \
            _tile_dpbf16ps(G, 6, 4);                          \
            _tile_dpbf16ps(G, 7, 4);                          \
            _tile_dpbf16ps(G, 6, 5);                          \
        }                                                     \
    }
#define PUT_DOWN(G) \
    if (count > G) _tile_stored(G, out + G * 256, 64);

/* out [d, 16 lanes] += values times weights; where weights are turned out is [d / 16, lanes, 16] and no sum yet. */
INLINE void weigh_values(const Tiles *t, int64_t pairs, int64_t d, int turned, float *out) {
    for (int64_t i = 0; i < d / 16; i += 4, out += 4 * 256) {
        int64_t count = d / 16 - i;
        if (turned) {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
        } else {
            TAKE_UP(0) TAKE_UP(1) TAKE_UP(2) TAKE_UP(3)
        }
        for (int64_t j = 0; j < pairs; j++) {
            const char *value = t->values + (j * d / 16 + i) * 2 * TILE_BYTES;
            _tile_loadd(4, t->weights + j * 2 * TILE_BYTES, 64);
            _tile_loadd(5, t->weights + (j * 2 + 1) * TILE_BYTES, 64);
            WEIGH(0) WEIGH(1) WEIGH(2) WEIGH(3)
        }
        PUT_DOWN(0) PUT_DOWN(1) PUT_DOWN(2) PUT_DOWN(3)
    }
}

/* q [rows, d] = values / sum. */
static void settle(const float *state, int64_t rows, int64_t d, float *q, int64_t stride) {
    vec mass = 1.0f / load(state + 16);
    for (int64_t i = 0; i < d; i += 16) {
        __m512i x[16];
        for (int64_t c = 0; c < 16; c++) x[c] = (__m512i)(load(state + (2 + i + c) * 16) * mass);
        transpose(x);
        for (int64_t r = 0; r < rows; r++) store(q + r * stride + i, (vec)x[r]);
    }
}

/* 16 rows of one head go on by a chunk; `state`: [max, sum, values [d]] of each lane. Row r sees keys 0 .. seen + r. */
static void attend_tile(const Tiles *t, const float *q, int64_t stride, int64_t rows, int64_t seen, int64_t pairs,
                        int64_t d, float *state) {
    const vec lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const float *queries[16];
    float scale = 1.44269504f / sqrtf((float)d);
    for (int64_t r = 0; r < rows; r++) queries[r] = q + r * stride;
    tile_queries(queries, rows, d, t->queries);
    score_tiles(t, pairs, d);
    vec before = load(state), most = largest_scores(t, pairs, lane + (float)seen, seen, before);
    vec rest = power((before - most) * scale);
    store(state, most);
    store(state + 16, load(state + 16) * rest + soften(t, pairs, scale, most * scale, 0));
    for (int64_t i = 2; i < d + 2; i++) store(state + i * 16, load(state + i * 16) * rest);
    weigh_values(t, pairs, d, 0, state + 32);
}

/* Tiles of rows and heads are dealt out to the threads; what they give takes the place of the queries. */
static void attend_prompt(const Model *m, const Batch *batch, const Buffers *b, int64_t layer, int thread, int threads) {
    const Span *span = batch->span;
    int64_t d = m->head_dim, group = m->heads / m->kv_heads, width = m->heads * d, end = span->start + span->count;
    int64_t size = (d + 2) * TILE_ROWS;
    Tiles t = tiles_of(b->tiles, d);
    configure(TILE_ROWS);
    for (int64_t kv = 0; kv < m->kv_heads; kv++) {
        int64_t at = layer * span->layer_stride + kv * span->head_stride;
        for (int64_t from = 0; from < end; from += CHUNK) {
            int64_t n = end - from < CHUNK ? end - from : CHUNK;
            chunk_keys(span->keys + at + from * d, n, d, t.keys);
            chunk_values(span->values + at + from * d, n, d, 1, t.values);
            for (int64_t first = 0; first < span->count; first += TILE_ROWS) {
                int64_t rows = span->count - first < TILE_ROWS ? span->count - first : TILE_ROWS;
                int64_t seen = span->start + first - from, all = seen + rows < n ? seen + rows : n;
                if (all <= 0) continue;
                for (int64_t h = kv * group; h < (kv + 1) * group; h++) {
                    if ((first / TILE_ROWS * group + h) % threads != thread) continue;
                    float *q = b->q + (span->first + first) * width + h * d;
                    float *state = b->partial + (first / TILE_ROWS * m->heads + h) * size;
                    if (!from) {
                        memset(state, 0, size * sizeof(float));
                        store(state, (vec){0} - INFINITY);
                    }
                    attend_tile(&t, q, width, rows, seen, (all + 31) / 32, d, state);
                    if (from + CHUNK >= span->start + first + rows) settle(state, rows, d, q, width);
                }
            }
        }
    }
}

/* Chunk c of all query heads of one KV head, whose keys and values are `at`, for all rows of a span that see it. */
static void attend_window(const Model *m, const Batch *batch, const Buffers *b, const Span *span, int64_t at, int64_t kv,
                          int64_t c) {
    int64_t d = m->head_dim, group = m->heads / m->kv_heads, from = c * CHUNK;
    int64_t left = span->start + span->count - from, n = left < CHUNK ? left : CHUNK, pairs = (n + 31) / 32;
    int64_t first = from > span->start ? from - span->start : 0, lanes = (span->count - first) * group;
    float scale = 1.0f / sqrtf((float)d), values[16 * d] __attribute__((aligned(64)));
    Tiles t = tiles_of(b->tiles, d);
    chunk_keys(span->keys + at + from * d, n, d, t.keys);
    chunk_values(span->values + at + from * d, n, d, 0, t.values);
    for (int64_t done = 0; done < lanes; done += 16) {
        int64_t count = lanes - done < 16 ? lanes - done : 16;
        const float *queries[16];
        float *out[16];
        vec last = {0};
        for (int64_t i = 0; i < count; i++) {
            int64_t row = first + (done + i) / group, head = kv * group + (done + i) % group;
            int64_t which = (span->first + row) * m->heads + head;
            queries[i] = b->q + which * d;
            out[i] = b->partial + (which * batch->chunks + c) * (d + 2);
            last[i] = (float)(span->start + row - from);
        }
        tile_queries(queries, count, d, t.queries);
        configure(TILE_ROWS);
        score_tiles(&t, pairs, d);
        vec most = largest_scores(&t, pairs, last, last[0], (vec){0} - INFINITY);
        vec mass = soften(&t, pairs, scale * 1.44269504f, most * scale * 1.44269504f, 1);
        configure((int)count);
        weigh_values(&t, pairs, d, 1, values);
        for (int64_t i = 0; i < count; i++) {
            out[i][0] = most[i] * scale;
            out[i][1] = mass[i];
            for (int64_t j = 0; j < d; j += 16) store(out[i] + 2 + j, load(values + j * 16 + i * 16));
        }
    }
}
