/* Attention of a prompt's rows by tiles: one sequence, 16 rows at a time, causal.

   Everything is transposed, rows across a vector's lanes: scores [16 keys, 16 rows] = K Q^T, values [16 dims, 16 rows] =
   V^T P^T, so that maxima, sums and masks of softmax are plain vector operations. Numbers go in as two bf16 halves and the
   product of both low ones is left out. Keys pass in chunks of fixed positions, each added to what the ones before have
   given, so that a row's result depends on its own history alone. */
#pragma once

/* A thread's memory: a chunk of one KV head's keys [CHUNK / 16][d / 32] and values [CHUNK / 32][d / 16], 16 rows of one
   head's queries [d / 32], all in two tiles of halves; their scores [CHUNK][16] and weights [CHUNK / 32] in halves. */
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

INLINE void store_tile(char *out, const __m512i x[16]) {
    for (int i = 0; i < 16; i++) _mm512_store_si512(out + i * 64, x[i]);
}

/* Keys of n positions, zeros behind them up to whole pairs of tiles: as they are, [16 keys][32 numbers]. */
static void chunk_keys(const float *keys, int64_t n, int64_t d, char *out) {
    for (int64_t j = 0; j < (n + 31) / 32 * 32; j++)
        for (int64_t i = 0; i < d; i += 32) {
            Halves halves = {_mm512_setzero_si512(), _mm512_setzero_si512()};
            if (j < n) halves = halves_of(load(keys + j * d + i), load(keys + j * d + i + LANES));
            char *to = out + (j / 16 * d / 32 + i / 32) * 2 * TILE_BYTES + j % 16 * 64;
            _mm512_store_si512(to, halves.high);
            _mm512_store_si512(to + TILE_BYTES, halves.low);
        }
}

/* Values of n positions, zeros behind them: [16 dims][32 positions]. */
static void chunk_values(const float *values, int64_t n, int64_t d, char *out) {
    for (int64_t j = 0; j < n; j += 32)
        for (int64_t i = 0; i < d; i += 16) {
            __m512i high[16], low[16];
            for (int64_t p = 0; p < 16; p++) {
                int64_t at = j + 2 * p;
                vec even = at < n ? load(values + at * d + i) : (vec){0};
                vec odd = at + 1 < n ? load(values + (at + 1) * d + i) : (vec){0};
                Halves halves = paired(even, odd);
                high[p] = halves.high, low[p] = halves.low;
            }
            transpose(high);
            transpose(low);
            char *to = out + (j / 32 * d / 16 + i / 16) * 2 * TILE_BYTES;
            store_tile(to, high);
            store_tile(to + TILE_BYTES, low);
        }
}

/* One head's queries of a tile's rows: [16 pairs of numbers][16 rows], zeros for rows that are not there. */
static void tile_queries(const float *q, int64_t stride, int64_t rows, int64_t d, char *out) {
    for (int64_t i = 0; i < d; i += 32) {
        __m512i high[16], low[16];
        for (int64_t r = 0; r < 16; r++) {
            Halves halves = {_mm512_setzero_si512(), _mm512_setzero_si512()};
            if (r < rows) halves = halves_of(load(q + r * stride + i), load(q + r * stride + i + LANES));
            high[r] = halves.high, low[r] = halves.low;
        }
        transpose(high);
        transpose(low);
        store_tile(out + i / 32 * 2 * TILE_BYTES, high);
        store_tile(out + (i / 32 * 2 + 1) * TILE_BYTES, low);
    }
}

/* scores [16 keys, 16 rows] of `pairs` pairs of key tiles. */
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

/* Weights of `pairs` pairs of key tiles; `state` [max, sum, values [d]] of 16 rows goes on to the new maximum. Row r sees
   key j while j <= seen + r. */
static void soften(const Tiles *t, int64_t pairs, int64_t seen, int64_t d, float scale, float *state) {
    const vec lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    vec before = load(state), most = before;
    for (int64_t j = seen + 1 > 0 ? seen + 1 : 0; j < pairs * 32; j++) {
        vec score = load(t->scores + j * 16);
        store(t->scores + j * 16, choose(lane < (float)(j - seen), (vec){0} - INFINITY, score));
    }
    for (int64_t j = 0; j < pairs * 32; j++) most = _mm512_max_ps((__m512)load(t->scores + j * 16), (__m512)most);
    scale *= 1.44269504f;
    vec rest = power((before - most) * scale), mass = load(state + 16) * rest, least = most * scale;
    for (int64_t j = 0; j < pairs * 16; j++) {
        const float *score = t->scores + j * 32;
        vec even = power(load(score) * scale - least), odd = power(load(score + 16) * scale - least);
        mass += even + odd;
        Halves halves = paired(even, odd);
        char *to = t->weights + j / 16 * 2 * TILE_BYTES + j % 16 * 64;
        _mm512_store_si512(to, halves.high);
        _mm512_store_si512(to + TILE_BYTES, halves.low);
    }
    store(state, most);
    store(state + 16, mass);
    for (int64_t i = 2; i < d + 2; i++) store(state + i * 16, load(state + i * 16) * rest);
}

#define TAKE_UP(G) \
    if (count > G) _tile_loadd(G, out + G * 256, 64);
#define WEIGH(G)                                                   \
    if (count > G) {                                               \
        _tile_loadd(6, value + G * 2 * TILE_BYTES, 64);            \
        _tile_dpbf16ps(G, 6, 4);                                   \
        _tile_loadd(7, value + (G * 2 + 1) * TILE_BYTES, 64);      \
        _tile_dpbf16ps(G, 7, 4);                                   \
        _tile_dpbf16ps(G, 6, 5);                                   \
    }
#define PUT_DOWN(G) \
    if (count > G) _tile_stored(G, out + G * 256, 64);

/* out [d, 16 rows] += values times weights. */
static void weigh_values(const Tiles *t, int64_t pairs, int64_t d, float *out) {
    for (int64_t i = 0; i < d / 16; i += 4, out += 4 * 256) {
        int64_t count = d / 16 - i;
        TAKE_UP(0) TAKE_UP(1) TAKE_UP(2) TAKE_UP(3)
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

/* Tiles of rows and heads are dealt out to the threads; what they give takes the place of the queries. */
static void attend_prompt(const Model *m, const Batch *batch, const Buffers *b, int64_t layer, int thread, int threads) {
    const Span *span = batch->span;
    int64_t d = m->head_dim, group = m->heads / m->kv_heads, width = m->heads * d, end = span->start + span->count;
    int64_t size = (d + 2) * TILE_ROWS;
    Tiles t = tiles_of(b->tiles, d);
    float scale = 1.0f / sqrtf((float)d);
    configure(16);
    for (int64_t kv = 0; kv < m->kv_heads; kv++) {
        int64_t at = layer * span->layer_stride + kv * span->head_stride;
        for (int64_t from = 0; from < end; from += CHUNK) {
            int64_t n = end - from < CHUNK ? end - from : CHUNK;
            chunk_keys(span->keys + at + from * d, n, d, t.keys);
            chunk_values(span->values + at + from * d, n, d, t.values);
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
                    tile_queries(q, width, rows, d, t.queries);
                    score_tiles(&t, (all + 31) / 32, d);
                    soften(&t, (all + 31) / 32, seen, d, scale, state);
                    weigh_values(&t, (all + 31) / 32, d, state + 2 * TILE_ROWS);
                    if (from + CHUNK >= span->start + first + rows) settle(state, rows, d, q, width);
                }
            }
        }
    }
}
