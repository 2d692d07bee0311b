/* Products by tiles of 16 rows x 16 outputs x 32 inputs (Intel AMX), bf16 with fp32 sums. All rows of a tile cost what one
   costs. Numbers x go in as two halves of 8 bits each.

   A few rows take the weights' numbers q as they are, exact in bf16, and put each block's sums on its grid: little is
   unpacked, and every row has the same bits in any company. The many rows of a prompt take whole weights as two halves
   as well: unpacking is shared by all rows, and the sums stay in the tiles to their end. */
#pragma once
#include <sys/syscall.h>
#include <unistd.h>

#define TILE_BYTES 1024
#define HIGH 4 /* the tiles' registers: sums of panel g in g, x in 4 and 5, weights in 6 and 7 */
#define LOW 5

/* Linux lends the tile registers to a process that asks. */
static int tiles_ready(void) {
    static int ready = -1;
    if (ready < 0) ready = !syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XTILEDATA */);
    return ready;
}

static void configure(int rows) {
    struct { uint8_t palette, start_row, reserved[14]; uint16_t bytes[16]; uint8_t rows[16]; } shape = {1};
    for (int i = 0; i < 8; i++) shape.bytes[i] = 64, shape.rows[i] = i <= LOW ? rows : 16;
    _tile_loadconfig(&shape);
}

/* Give the tile registers back: a thread that holds them is dearer to switch. */
static void tiles_done(void) {
    if (tiles_ready()) _tile_release();
}

typedef struct {
    __m512i high, low;
} Halves;

/* 32 numbers in their order. */
INLINE Halves halves_of(vec x, vec y) {
    __m512i high = (__m512i)_mm512_cvtne2ps_pbh((__m512)y, (__m512)x);
    x -= (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(high)), 16);
    y -= (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(high, 1)), 16);
    return (Halves){high, (__m512i)_mm512_cvtne2ps_pbh((__m512)y, (__m512)x)};
}

/* 16 pairs (even, odd), side by side. */
INLINE Halves paired(vec even, vec odd) {
    static const uint16_t ORDER[32] __attribute__((aligned(64))) = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                                    21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                                    11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    __m512i order = _mm512_load_si512(ORDER);
    __m512i high = _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even));
    even -= (vec)_mm512_slli_epi32(high, 16);
    odd -= (vec)((ivec)high & (int32_t)0xffff0000);
    return (Halves){high, _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even))};
}

/* A row of two tiles that lie side by side in memory. */
INLINE void store_halves(char *to, Halves halves) {
    _mm512_store_si512(to, halves.high);
    _mm512_store_si512(to + TILE_BYTES, halves.low);
}

/* The halves of the rows of one tile, by blocks: [k / BLOCK][2][rows][BLOCK]. */
INLINE void split(const Input *in, int64_t first) {
    int64_t k = in->k, rows = in->rows - first < TILE_ROWS ? in->rows - first : TILE_ROWS;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t b = 0; b < k / BLOCK; b++) {
            const float *x = in->x + (first + r) * k + b * BLOCK;
            uint16_t *to = in->halves + first * k * 2 + (b * 2 * rows + r) * BLOCK;
            Halves halves = halves_of(load(x), load(x + LANES));
            _mm512_storeu_si512(to, halves.high);
            _mm512_storeu_si512(to + rows * BLOCK, halves.low);
        }
}

/* A block's numbers q in bf16, pairs of inputs side by side: [BLOCK / 2][NR][2]. */
INLINE void expand(int64_t kind, const char *block, char *out) {
    if (kind == Q4) {
        /* bf16 of 0..15, twice: the index uses five bits, and the fifth is the next nibble's. */
        static const uint16_t NUMBERS[32] __attribute__((aligned(64))) = {
            0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150,
            0x4160, 0x4170, 0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130,
            0x4140, 0x4150, 0x4160, 0x4170};
        __m512i table = _mm512_load_si512(NUMBERS);
        for (int i = 0; i < 4; i++) {
            __m512i eight = _mm512_loadu_si512(block + i * 64);
            _mm512_store_si512(out + i * 256, _mm512_permutexvar_epi16(eight, table));
            _mm512_store_si512(out + i * 256 + 64, _mm512_permutexvar_epi16(_mm512_srli_epi16(eight, 4), table));
            _mm512_store_si512(out + i * 256 + 128, _mm512_permutexvar_epi16(_mm512_srli_epi16(eight, 8), table));
            _mm512_store_si512(out + i * 256 + 192, _mm512_permutexvar_epi16(_mm512_srli_epi16(eight, 12), table));
        }
        return;
    }
    for (int i = 0; i < 8; i++) {
        ivec four = words(block + i * 64, 0), upper = (ivec){0} + (int32_t)0xffff0000;
        for (int t = 0; t < 4; t += 2) {
            vec even = __builtin_convertvector((four << (24 - 8 * t)) >> 24, vec);
            vec odd = __builtin_convertvector((four << (16 - 8 * t)) >> 24, vec);
            ivec pair = ((ivec)odd & upper) | ((ivec)even >> 16 & 0xffff);
            _mm512_store_si512(out + i * 128 + t * 32, (__m512i)pair);
        }
    }
}

#define BEGIN(G, B)                                                                \
    if (count > G) {                                                               \
        if (kind != BF16) _tile_zero(G);                                           \
        _tile_loadd(B, kind == BF16 ? source[G] : to + G * TILE_BYTES, 64);        \
        _tile_dpbf16ps(G, LOW, B);                                                 \
    }
#define END(G, B) \
    if (count > G) _tile_dpbf16ps(G, HIGH, B);
#define KEEP(G) \
    if (count > G) _tile_stored(G, sums + G * TILE_ROWS * NR, 64);

INLINE void tile_blocks(int64_t kind, const Linear *linear, const Input *in, const int64_t *at, int count, Emit *emit,
                        void *into) {
    int64_t k = in->k, blocks = k / BLOCK;
    float sums[GROUP * TILE_ROWS * NR] __attribute__((aligned(64))), out[TILE_ROWS * GROUP * NR];
    for (int64_t first = 0; first < in->rows; first += TILE_ROWS) {
        int rows = in->rows - first < TILE_ROWS ? (int)(in->rows - first) : TILE_ROWS;
        if (!first || rows < TILE_ROWS) configure(rows);
        for (int i = 0; i < rows * GROUP * NR; i += LANES) store(out + i, (vec){0});
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t b = 0; b < blocks; b++) {
            const char *source[GROUP];
            char *to = (char *)in->expanded + b * GROUP * TILE_BYTES;
            const uint16_t *x = in->halves + first * k * 2 + b * 2 * rows * BLOCK;
            _tile_loadd(HIGH, x, 64);
            _tile_loadd(LOW, x + rows * BLOCK, 64);
            for (int g = 0; g < count; g++) {
                source[g] = block_at(linear, at[g], b);
                if (kind != BF16 && !first) expand(kind, source[g], to + g * TILE_BYTES);
            }
            BEGIN(0, 6) BEGIN(1, 7) END(0, 6) END(1, 7)
            BEGIN(2, 6) BEGIN(3, 7) END(2, 6) END(3, 7)
            if (kind == BF16) continue;
            KEEP(0) KEEP(1) KEEP(2) KEEP(3)
            for (int g = 0; g < count; g++) {
                Grid grid = grid_of(kind, source[g], 0);
                for (int r = 0; r < rows; r++) {
                    float *y = out + (r * GROUP + g) * NR;
                    vec sum = load(sums + (g * TILE_ROWS + r) * NR);
                    store(y, load(y) + on_grid(kind, grid, sum, in->sums[(first + r) * blocks + b]));
                }
            }
        }
        if (kind == BF16) {
            KEEP(0) KEEP(1) KEEP(2) KEEP(3)
            for (int g = 0; g < count; g++)
                for (int r = 0; r < rows; r++)
                    store(out + (r * GROUP + g) * NR, load(sums + (g * TILE_ROWS + r) * NR));
        }
        for (int r = 0; r < rows; r++) emit(into, linear, first + r, at, count, out + r * GROUP * NR);
    }
}

/* Whole weights of a block as two tiles of halves. */
INLINE void expand_halves(int64_t kind, const char *block, char *out) {
    float q[BLOCK * NR] __attribute__((aligned(64)));
    Grid grid = grid_of(kind, block, 0);
    unpack(kind, block, q);
    for (int i = 0; i < BLOCK; i += 2) {
        vec even = on_grid(kind, grid, load(q + i * NR), 1.0f), odd = on_grid(kind, grid, load(q + (i + 1) * NR), 1.0f);
        store_halves(out + i * 32, paired(even, odd));
    }
}

#define WEIGHT(G, B, HALF) \
    if (count > G) _tile_loadd(B, weight + G * step + HALF * TILE_BYTES, 64);
#define TIMES(G, X, B) \
    if (count > G) _tile_dpbf16ps(G, X, B);
/* Panels C and D, two at a time as a product must be ready before the next is added to it. Both low halves: left out. */
#define MULTIPLY(C, D)                                                                          \
    WEIGHT(C, 6, 0) WEIGHT(D, 7, 0) TIMES(C, HIGH, 6) TIMES(D, HIGH, 7) TIMES(C, LOW, 6) TIMES(D, LOW, 7) \
    if (kind != BF16) {                                                                         \
        WEIGHT(C, 6, 1) WEIGHT(D, 7, 1) TIMES(C, HIGH, 6) TIMES(D, HIGH, 7)                     \
    }
#define TAKE(G) \
    if (count > G) _tile_stored(G, out + G * NR, GROUP * NR * sizeof(float));

INLINE void wide_blocks(int64_t kind, const Linear *linear, const Input *in, const int64_t *at, int count, Emit *emit,
                        void *into) {
    int64_t k = in->k, blocks = k / BLOCK, step = (kind == BF16 ? 1 : 2) * TILE_BYTES;
    float out[TILE_ROWS * GROUP * NR] __attribute__((aligned(64)));
    for (int64_t b = 0; b < blocks; b++)
        for (int g = 0; g < count; g++) {
            char *to = (char *)in->expanded + (b * GROUP + g) * step;
            if (kind == BF16) memcpy(to, block_at(linear, at[g], b), TILE_BYTES);
            else expand_halves(kind, block_at(linear, at[g], b), to);
        }
    for (int64_t first = 0; first < in->rows; first += TILE_ROWS) {
        int rows = in->rows - first < TILE_ROWS ? (int)(in->rows - first) : TILE_ROWS;
        if (!first || rows < TILE_ROWS) configure(rows);
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t b = 0; b < blocks; b++) {
            const uint16_t *x = in->halves + first * k * 2 + b * 2 * rows * BLOCK;
            const char *weight = (const char *)in->expanded + b * GROUP * step;
            _tile_loadd(HIGH, x, 64);
            _tile_loadd(LOW, x + rows * BLOCK, 64);
            MULTIPLY(0, 1)
            MULTIPLY(2, 3)
        }
        TAKE(0) TAKE(1) TAKE(2) TAKE(3)
        for (int r = 0; r < rows; r++) emit(into, linear, first + r, at, count, out + r * GROUP * NR);
    }
}
