/* Products by tiles of 16 rows x 16 outputs x 32 inputs (Intel AMX). All rows of a tile cost what one costs. */
#pragma once
#include <sys/syscall.h>
#include <unistd.h>

#define TILE_ROWS 16
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

INLINE void split(Input *in) {
    for (int64_t i = 0; i < in->rows * in->k; i += 16) {
        __m512 x = _mm512_loadu_ps(in->x + i);
        __m256i high = (__m256i)_mm512_cvtneps_pbh(x);
        __m512 kept = (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16);
        _mm256_storeu_si256((__m256i *)(in->high + i), high);
        _mm256_storeu_si256((__m256i *)(in->low + i), (__m256i)_mm512_cvtneps_pbh(x - kept));
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
        _tile_loadd(B, kind == BF16 ? source[G] : to + G * 1024, 64);              \
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
            char *to = (char *)in->expanded + b * GROUP * 1024;
            _tile_loadd(HIGH, in->high + first * k + b * BLOCK, k * 2);
            _tile_loadd(LOW, in->low + first * k + b * BLOCK, k * 2);
            for (int g = 0; g < count; g++) {
                source[g] = block_at(linear, at[g], b);
                if (kind != BF16 && !first) expand(kind, source[g], to + g * 1024);
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
