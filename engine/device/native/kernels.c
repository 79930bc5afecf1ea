/* A step on the CPU: residual add with RMSNorm, rotary positions with KV write, attention straight from the paged KV
 * pool, and matrix products in bfloat16. Plain C11 with GCC's vector extensions; loaded with ctypes.
 *
 * Promise: the output of a row is a function of that row's own sequence. Attention walks key tiles of TILE tokens at
 * absolute positions 0, TILE, 2 TILE, ... with an online softmax (Milakov and Gimelshein 2018; tiling as in
 * FlashAttention-2, Dao 2023), every lane and every row sees the same operations in the same order however many rows
 * are computed beside it, and a query at position p has the same bits as a prompt token and as a generated one.
 * Keys after a row's own position count as exactly nothing. No reassociation is allowed (no -ffast-math) and products
 * are fused only where the code says so (-ffp-contract=off), so the count of threads changes nothing either.
 *
 * Sums are float32. With AVX512_BF16 and a bfloat16 cache, products are of bfloat16 pairs and probabilities are rounded
 * to bfloat16 before they weigh the values (their sum is taken after rounding), as torch's own kernel does.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef __AVX__
#include <immintrin.h>
#endif
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512BF16__)
#define HAVE_DOT_BF16 1
#else
#define HAVE_DOT_BF16 0
#endif

/* Vector registers: their float lanes, and how many rows and vectors of accumulators one block of a product keeps. */
#define MAX_ROWS 6
#if defined(__AVX512F__)
#define LANES 16
#define MAX_VECS 4
#elif defined(__AVX__)
#define LANES 8
#define MAX_VECS 2
#elif defined(__aarch64__)
#define LANES 4
#define MAX_VECS 4
#else
#define LANES 4
#define MAX_VECS 2
#endif
#define TILE 64  /* keys; a multiple of every LANES */
#define GRAIN 16 /* widths are padded to it, whatever LANES is */

typedef float vf __attribute__((vector_size(LANES * 4)));
typedef int32_t vi __attribute__((vector_size(LANES * 4)));
typedef uint32_t quad __attribute__((vector_size(16), aligned(4)));
typedef uint16_t bf16;

enum { FLOAT32 = 0, BFLOAT16 = 1 };

/* One step, the same for all its layers. Mirrored field by field in library.py. */
typedef struct {
    void *pool;           /* [blocks + 1, layers, 2, block_size, kv_heads, head_dim] */
    const float *cos;     /* [context, head_dim], both halves equal */
    const float *sin;     /* [context, head_dim], the first half negated */
    const int32_t *rows;  /* [num_rows, 2]: position, block that holds it */
    const int32_t *items; /* [num_items, 4]: first row, count, position of the first, offset of its table */
    const int32_t *tables;
    int64_t num_rows, num_items;
    int64_t layers, block_size, heads, kv_heads, head_dim;
    int64_t dtype, threads;
} Step;

static inline float to_float(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

static inline bf16 to_bf16(float f) { /* to nearest even; NaN stays NaN */
    uint32_t bits;
    memcpy(&bits, &f, 4);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (bf16)((bits & 0x7fffffff) > 0x7f800000 ? (bits >> 16) | 0x40 : rounded);
}

static inline vf splat(float x) { return x - (vf){0}; }

static inline vf fma_vec(vf a, vf b, vf c) {
#ifdef __AVX512F__
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__) && LANES == 8
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__FP_FAST_FMAF)
    vf r;
    for (int i = 0; i < LANES; i++) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return r;
#else
    return a * b + c;
#endif
}

static inline vf choose(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }

static inline float sum_vec(vf x) { /* always as a tree of halves */
    float s[LANES];
    memcpy(s, &x, sizeof s);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) s[i] += s[i + half];
    return s[0];
}

static inline float max_vec(vf x) {
#ifdef __AVX512F__
    return _mm512_reduce_max_ps((__m512)x);
#else
    float m = x[0];
    for (int i = 1; i < LANES; i++) m = x[i] > m ? x[i] : m;
    return m;
#endif
}

/* 2^x for x <= 0, about 1e-7 relative; what is below 2^-126 gives 2^-126. NaN stays NaN. */
static inline vf exp2_vec(vf x) {
    const vf lowest = splat(-126.0f), magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    x = choose(x < lowest, lowest, x);
    vf t = x + magic;
    vf f = x - (t - magic); /* in [-1/2, 1/2] */
    vf p = splat(1.5403530393381608e-4f);
    p = fma_vec(p, f, splat(1.3333558146428443e-3f));
    p = fma_vec(p, f, splat(9.618129107628477e-3f));
    p = fma_vec(p, f, splat(5.550410866482158e-2f));
    p = fma_vec(p, f, splat(2.402265069591007e-1f));
    p = fma_vec(p, f, splat(6.931471805599453e-1f));
    p = fma_vec(p, f, splat(1.0f));
    return p * (vf)(((vi)t << 23) + 0x3f800000);
}

/* ---- residual add and RMSNorm ------------------------------------------------------------------------------------ */

static inline vf load_vec(const void *base, int64_t at, int64_t count, int dtype) {
    vf x = {0};
    if (dtype == FLOAT32) {
        if (count >= LANES) memcpy(&x, (const float *)base + at, sizeof x);
        else memcpy(&x, (const float *)base + at, count * sizeof(float));
        return x;
    }
    bf16 raw[LANES] = {0};
    if (count >= LANES) memcpy(raw, (const bf16 *)base + at, sizeof raw);
    else memcpy(raw, (const bf16 *)base + at, count * sizeof(bf16));
    vi wide;
    for (int i = 0; i < LANES; i++) wide[i] = (int32_t)((uint32_t)raw[i] << 16);
    return (vf)wide;
}

static inline void store_vec(void *base, int64_t at, int64_t count, int dtype, vf x) {
    if (dtype == FLOAT32) {
        if (count >= LANES) memcpy((float *)base + at, &x, sizeof x);
        else memcpy((float *)base + at, &x, count * sizeof(float));
        return;
    }
    bf16 raw[LANES];
#if HAVE_DOT_BF16
    __m256i rounded = (__m256i)_mm512_cvtneps_pbh((__m512)x); /* subnormal numbers become zero */
    memcpy(raw, &rounded, sizeof raw);
#else
    float f[LANES];
    memcpy(f, &x, sizeof f);
    for (int i = 0; i < LANES; i++) raw[i] = to_bf16(f[i]);
#endif
    if (count >= LANES) memcpy((bf16 *)base + at, raw, sizeof raw);
    else memcpy((bf16 *)base + at, raw, count * sizeof(bf16));
}

static inline __attribute__((always_inline)) void add_norm_row(
    void *x, const void *delta, const void *weight, void *out, int64_t row, int64_t hidden, float eps, int dtype) {
    int64_t base = row * hidden;
    vf sum = {0};
    for (int64_t i = 0; i < hidden; i += LANES) {
        vf v = load_vec(x, base + i, hidden - i, dtype);
        if (delta) {
            v = v + load_vec(delta, base + i, hidden - i, dtype);
            store_vec(x, base + i, hidden - i, dtype, v);
            v = load_vec(x, base + i, hidden - i, dtype); /* as rounded */
        }
        sum = fma_vec(v, v, sum);
    }
    vf scale = splat(1.0f / sqrtf(sum_vec(sum) / (float)hidden + eps));
    for (int64_t i = 0; i < hidden; i += LANES) {
        vf v = load_vec(x, base + i, hidden - i, dtype) * scale * load_vec(weight, i, hidden - i, dtype);
        store_vec(out, base + i, hidden - i, dtype, v);
    }
}

/* x += delta (unless null), in place and rounded to the type; out = x / rms(x) * weight. All [rows, hidden]. */
void terazi_add_norm(void *x, const void *delta, const void *weight, void *out, int64_t rows, int64_t hidden, float eps,
                     int64_t dtype, int64_t threads) {
#pragma omp parallel for num_threads((int)threads) if (threads > 1 && rows >= 16) schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        if (dtype == FLOAT32) add_norm_row(x, delta, weight, out, row, hidden, eps, FLOAT32);
        else add_norm_row(x, delta, weight, out, row, hidden, eps, BFLOAT16);
    }
}

/* ---- rotary positions and KV write ------------------------------------------------------------------------------- */

static inline size_t element_size(int64_t dtype) { return dtype == FLOAT32 ? 4 : 2; }

/* Where one layer's keys (kind 0) or values (kind 1) of a block start, in elements. */
static inline int64_t block_start(const Step *s, int64_t layer, int64_t block, int kind) {
    return ((block * s->layers + layer) * 2 + kind) * s->block_size * s->kv_heads * s->head_dim;
}

static void rotate_float(const float *restrict in, float *restrict out, const float *restrict cos,
                         const float *restrict sin, int64_t half) {
    for (int64_t d = 0; d < half; d++) {
        float first = in[d], second = in[half + d];
        out[d] = first * cos[d] + second * sin[d];
        out[half + d] = second * cos[d] + first * sin[half + d];
    }
}

static void rotate(const void *in, void *out, const float *cos, const float *sin, int64_t head_dim, int64_t dtype) {
    float wide[1024], turned[1024];
    if (dtype == FLOAT32) {
        memcpy(wide, in, head_dim * sizeof(float));
        rotate_float(wide, out, cos, sin, head_dim / 2);
        return;
    }
    const bf16 *narrow = in;
    for (int64_t d = 0; d < head_dim; d++) wide[d] = to_float(narrow[d]);
    rotate_float(wide, turned, cos, sin, head_dim / 2);
    bf16 *result = out;
    for (int64_t d = 0; d < head_dim; d++) result[d] = to_bf16(turned[d]);
}

/* Rotates queries in place; rotated keys and values go to the pool. qkv: [num_rows, heads + 2 kv_heads, head_dim]. */
void terazi_rotate_write(const Step *s, int64_t layer, void *qkv) {
    size_t size = element_size(s->dtype);
    int64_t dim = s->head_dim, width = (s->heads + 2 * s->kv_heads) * dim, token = s->kv_heads * dim;
#pragma omp parallel for num_threads((int)s->threads) if (s->threads > 1 && s->num_rows >= 16) schedule(static)
    for (int64_t row = 0; row < s->num_rows; row++) {
        int64_t position = s->rows[2 * row], block = s->rows[2 * row + 1];
        int64_t inside = position % s->block_size * token;
        char *heads = (char *)qkv + row * width * size;
        char *keys = (char *)s->pool + (block_start(s, layer, block, 0) + inside) * size;
        char *values = (char *)s->pool + (block_start(s, layer, block, 1) + inside) * size;
        const float *cos = s->cos + position * dim, *sin = s->sin + position * dim;
        for (int64_t head = 0; head < s->heads; head++)
            rotate(heads + head * dim * size, heads + head * dim * size, cos, sin, dim, s->dtype);
        for (int64_t head = 0; head < s->kv_heads; head++)
            rotate(heads + (s->heads + head) * dim * size, keys + head * dim * size, cos, sin, dim, s->dtype);
        memcpy(values, heads + (s->heads + s->kv_heads) * dim * size, token * size);
    }
}

/* ---- attention --------------------------------------------------------------------------------------------------- */

/* Scratch of one thread. Queries and packed keys, values and probabilities are float32, or dwords of bfloat16 pairs. */
typedef struct {
    uint32_t *queries; /* [rows, depth] */
    uint32_t *keys;    /* [depth, TILE]: transposed, so that lanes are keys */
    uint32_t *values;  /* [TILE or TILE / 2, width]: lanes are dimensions */
    float *sums;       /* [rows, width] */
    float *peaks;      /* [rows] */
    vf *totals;        /* [rows], lane by lane */
    float scores[MAX_ROWS * TILE] __attribute__((aligned(64)));
    uint32_t weights[MAX_ROWS * TILE] __attribute__((aligned(64)));
} Scratch;

static _Thread_local char *arena;
static _Thread_local size_t arena_size;

/* At least so many bytes, on a cache line; the same ones at each call of this thread. Null when there are none. */
static void *reserve_bytes(size_t bytes) {
    if (bytes > arena_size) {
        free(arena);
        arena = aligned_alloc(64, (bytes + 63) / 64 * 64);
        arena_size = arena ? bytes : 0;
    }
    return arena;
}

static int reserve(Scratch *scratch, int64_t rows, int64_t depth, int64_t width) {
    size_t counts[] = {rows * depth, depth * TILE, TILE * width, rows * width, rows, rows * LANES};
    size_t total = 0;
    for (int i = 0; i < 6; i++) total += (counts[i] * 4 + 63) / 64 * 64;
    if (!reserve_bytes(total)) return 0;
    void **parts[] = {(void **)&scratch->queries, (void **)&scratch->keys,  (void **)&scratch->values,
                      (void **)&scratch->sums,    (void **)&scratch->peaks, (void **)&scratch->totals};
    char *at = arena;
    for (int i = 0; i < 6; i++) {
        *parts[i] = at;
        at += (counts[i] * 4 + 63) / 64 * 64;
    }
    return 1;
}

#ifdef __AVX512F__
/* 16 vectors of 16 dwords, transposed and stored with a stride. */
static inline __attribute__((always_inline)) void transpose16(__m512i r[16], uint32_t *out, int64_t stride) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            r[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
            r[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
        }
    for (int i = 0; i < 16; i += 8)
        for (int j = 0; j < 4; j++) {
            t[i + j] = _mm512_shuffle_i32x4(r[i + j], r[i + j + 4], 0x88);
            t[i + j + 4] = _mm512_shuffle_i32x4(r[i + j], r[i + j + 4], 0xdd);
        }
    for (int j = 0; j < 8; j++) {
        _mm512_store_si512(out + j * stride, _mm512_shuffle_i32x4(t[j], t[j + 8], 0x88));
        _mm512_store_si512(out + (j + 8) * stride, _mm512_shuffle_i32x4(t[j], t[j + 8], 0xdd));
    }
}
#endif

/* Dwords of one key into a column of the transposed keys, and of values into rows: any type and head_dim. */
static void pack_slowly(const Scratch *scratch, const char *const *keys, const char *const *values, int64_t count,
                        int64_t padded, int64_t dim, int64_t width, int dtype, int as_pairs) {
    int64_t depth = as_pairs ? dim / 2 : dim;
    int is_dwords = as_pairs || dtype == FLOAT32;
    memset(scratch->values, 0, (as_pairs ? padded / 2 : padded) * width * 4);
    for (int64_t key = 0; key < padded; key += 4) {
        int64_t d = 0;
        for (; is_dwords && key + 4 <= count && d + 4 <= depth; d += 4) {
            quad r0, r1, r2, r3;
            memcpy(&r0, keys[key] + 4 * d, 16);
            memcpy(&r1, keys[key + 1] + 4 * d, 16);
            memcpy(&r2, keys[key + 2] + 4 * d, 16);
            memcpy(&r3, keys[key + 3] + 4 * d, 16);
            quad a = __builtin_shuffle(r0, r1, (quad){0, 4, 1, 5}), b = __builtin_shuffle(r0, r1, (quad){2, 6, 3, 7});
            quad c = __builtin_shuffle(r2, r3, (quad){0, 4, 1, 5}), e = __builtin_shuffle(r2, r3, (quad){2, 6, 3, 7});
            uint32_t *out = scratch->keys + d * TILE + key;
            *(quad *)out = __builtin_shuffle(a, c, (quad){0, 1, 4, 5});
            *(quad *)(out + TILE) = __builtin_shuffle(a, c, (quad){2, 3, 6, 7});
            *(quad *)(out + 2 * TILE) = __builtin_shuffle(b, e, (quad){0, 1, 4, 5});
            *(quad *)(out + 3 * TILE) = __builtin_shuffle(b, e, (quad){2, 3, 6, 7});
        }
        for (; d < depth; d++)
            for (int64_t i = key; i < key + 4; i++) {
                uint32_t dword = 0;
                if (i < count && is_dwords) memcpy(&dword, keys[i] + 4 * d, 4);
                else if (i < count) dword = (uint32_t)((const bf16 *)keys[i])[d] << 16;
                scratch->keys[d * TILE + i] = dword;
            }
    }
    for (int64_t key = 0; key < count; key++) {
        if (as_pairs) {
            bf16 *pairs = (bf16 *)(scratch->values + key / 2 * width) + key % 2;
            for (int64_t d = 0; d < dim; d++) pairs[2 * d] = ((const bf16 *)values[key])[d];
        } else if (dtype == FLOAT32) {
            memcpy(scratch->values + key * width, values[key], dim * 4);
        } else {
            for (int64_t d = 0; d < dim; d++)
                scratch->values[key * width + d] = (uint32_t)((const bf16 *)values[key])[d] << 16;
        }
    }
}

/* Keys and values of one tile; what is not there is zero, so that it weighs exactly nothing. */
static void pack(const Scratch *scratch, const char *const *keys, const char *const *values, int64_t count,
                 int64_t padded, int64_t dim, int64_t width, int dtype, int as_pairs) {
#ifdef __AVX512F__
    int64_t step = as_pairs ? 32 : LANES; /* elements of a vector */
    if (dim % step || (dtype == BFLOAT16 && !as_pairs)) {
        pack_slowly(scratch, keys, values, count, padded, dim, width, dtype, as_pairs);
        return;
    }
    for (int64_t first = 0; first < padded; first += LANES)
        for (int64_t d = 0; d < dim / step; d++) {
            __m512i rows[LANES];
            for (int i = 0; i < LANES; i++)
                rows[i] = first + i < count ? _mm512_loadu_si512(keys[first + i] + 64 * d) : _mm512_setzero_si512();
            transpose16(rows, scratch->keys + d * LANES * TILE + first, TILE);
        }
#if HAVE_DOT_BF16
    if (as_pairs) {
        __m512i low = _mm512_setzero_si512(), high;
        uint16_t index[32];
        for (int i = 0; i < 32; i++) index[i] = (uint16_t)(i / 2 + i % 2 * 32);
        low = _mm512_loadu_si512(index);
        high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
        for (int64_t key = 0; key < padded; key += 2)
            for (int64_t d = 0; d < dim / 32; d++) {
                __m512i a = _mm512_setzero_si512(), b = a;
                if (key < count) a = _mm512_loadu_si512(values[key] + 64 * d);
                if (key + 1 < count) b = _mm512_loadu_si512(values[key + 1] + 64 * d);
                uint32_t *out = scratch->values + key / 2 * width + 32 * d;
                _mm512_store_si512(out, _mm512_permutex2var_epi16(a, low, b));
                _mm512_store_si512(out + 16, _mm512_permutex2var_epi16(a, high, b));
            }
        return;
    }
#endif
    for (int64_t key = 0; key < padded; key++) {
        if (key < count) memcpy(scratch->values + key * width, values[key], dim * 4);
        else memset(scratch->values + key * width, 0, dim * 4);
    }
#else
    pack_slowly(scratch, keys, values, count, padded, dim, width, dtype, as_pairs);
#endif
}

/* c[r][v] (+)= sum over k, in order, of a[r][k] * b[k][v]: `rows` rows and `vecs` vectors, which are constants. */
static inline __attribute__((always_inline)) void multiply_block(
    const uint32_t *a, int64_t a_stride, const uint32_t *b, int64_t b_stride, int64_t depth, float *c, int64_t c_stride,
    int adds, const int rows, const int vecs, const int as_pairs) {
    vf acc[MAX_ROWS][MAX_VECS];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vecs; v++) acc[r][v] = adds ? *(vf *)(c + r * c_stride + v * LANES) : (vf){0};
    for (int64_t k = 0; k < depth; k++) {
        vf right[MAX_VECS];
#pragma GCC unroll 4
        for (int v = 0; v < vecs; v++) right[v] = *(const vf *)(b + k * b_stride + v * LANES);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            int32_t bits;
            memcpy(&bits, a + r * a_stride + k, 4);
            vf left = (vf)(bits - (vi){0});
#pragma GCC unroll 4
            for (int v = 0; v < vecs; v++) {
#if HAVE_DOT_BF16
                if (as_pairs) {
                    acc[r][v] = (vf)_mm512_dpbf16_ps((__m512)acc[r][v], (__m512bh)left, (__m512bh)right[v]);
                    continue;
                }
#endif
                (void)as_pairs;
                acc[r][v] = fma_vec(left, right[v], acc[r][v]);
            }
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vecs; v++) *(vf *)(c + r * c_stride + v * LANES) = acc[r][v];
}

typedef void (*Multiply)(const uint32_t *, int64_t, const uint32_t *, int64_t, int64_t, float *, int64_t, int, int);
#define MULTIPLY(rows, vecs)                                                                                          \
    static void multiply_##rows##_##vecs(const uint32_t *a, int64_t a_stride, const uint32_t *b, int64_t b_stride,    \
                                         int64_t depth, float *c, int64_t c_stride, int adds, int as_pairs) {         \
        if (as_pairs) multiply_block(a, a_stride, b, b_stride, depth, c, c_stride, adds, rows, vecs, HAVE_DOT_BF16);  \
        else multiply_block(a, a_stride, b, b_stride, depth, c, c_stride, adds, rows, vecs, 0);                       \
    }
#if MAX_VECS == 4
#define FOR_VECS(rows) MULTIPLY(rows, 1) MULTIPLY(rows, 2) MULTIPLY(rows, 3) MULTIPLY(rows, 4)
#define NAMES(rows) {multiply_##rows##_1, multiply_##rows##_2, multiply_##rows##_3, multiply_##rows##_4}
#else
#define FOR_VECS(rows) MULTIPLY(rows, 1) MULTIPLY(rows, 2)
#define NAMES(rows) {multiply_##rows##_1, multiply_##rows##_2}
#endif
FOR_VECS(1) FOR_VECS(2) FOR_VECS(3) FOR_VECS(4) FOR_VECS(5) FOR_VECS(6)
static const Multiply multiply_table[MAX_ROWS][MAX_VECS] = {NAMES(1), NAMES(2), NAMES(3),
                                                            NAMES(4), NAMES(5), NAMES(6)};

/* c[rows][width] (+)= a[rows][depth] * b[depth][width]; width a multiple of LANES. */
static inline void multiply(const uint32_t *a, int64_t a_stride, const uint32_t *b, int64_t b_stride, int64_t depth,
                            float *c, int64_t c_stride, int adds, int64_t rows, int64_t width, int as_pairs) {
    for (int64_t at = 0; at < width; at += MAX_VECS * LANES) {
        int64_t vecs = (width - at) / LANES < MAX_VECS ? (width - at) / LANES : MAX_VECS;
        multiply_table[rows - 1][vecs - 1](a, a_stride, b + at, b_stride, depth, c + at, c_stride, adds, as_pairs);
    }
}

static const int32_t lanes[TILE] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
                                    16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31,
                                    32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47,
                                    48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63};

/* One row's scores to weights, for the first `seen` of `keys` keys; the others weigh exactly nothing. */
static inline void soften(Scratch *scratch, int64_t row, const float *scores, uint32_t *weights, int64_t keys,
                          int64_t seen, float scale, int64_t width, int as_pairs) {
    vf score[TILE / LANES], peaks = splat(-INFINITY);
    vi limit = (int32_t)(seen < TILE ? seen : TILE) - (vi){0};
    for (int64_t v = 0; v < keys / LANES; v++) {
        vi lane;
        memcpy(&lane, lanes + v * LANES, sizeof lane);
        score[v] = choose(lane < limit, *(const vf *)(scores + v * LANES) * scale, splat(-INFINITY));
        peaks = choose(score[v] > peaks, score[v], peaks);
    }
    float old = scratch->peaks[row], peak = max_vec(peaks);
    vf total = scratch->totals[row];
    if (peak > old) {
        float *sums = scratch->sums + row * width;
        vf shrink = exp2_vec(splat(old - peak));
        total *= shrink;
        for (int64_t d = 0; d < width; d += LANES) *(vf *)(sums + d) *= shrink;
        scratch->peaks[row] = peak;
    } else {
        peak = old;
    }
    for (int64_t v = 0; v < keys / LANES; v++) {
        vi lane;
        memcpy(&lane, lanes + v * LANES, sizeof lane);
        vf weight = choose(lane < limit, exp2_vec(score[v] - peak), (vf){0});
#if HAVE_DOT_BF16
        if (as_pairs) {
            __m256i rounded = (__m256i)_mm512_cvtneps_pbh((__m512)weight);
            _mm256_store_si256((__m256i *)(weights + v * LANES / 2), rounded);
            total += (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded), 16);
            continue;
        }
#endif
        (void)as_pairs;
        *(vf *)(weights + v * LANES) = weight;
        total += weight;
    }
    scratch->totals[row] = total;
}

/* Where keys and values of up to TILE tokens from `start` lie, for KV head 0. */
typedef struct {
    const char *keys[TILE], *values[TILE];
    int64_t count;
} Tile;

static void locate(const Step *s, int64_t layer, const int32_t *table, int64_t start, int64_t end, Tile *tile) {
    size_t size = element_size(s->dtype);
    int64_t token = s->kv_heads * s->head_dim * (int64_t)size;
    tile->count = end - start < TILE ? end - start : TILE;
    for (int64_t i = 0; i < tile->count;) {
        int64_t inside = (start + i) % s->block_size, block = table[(start + i) / s->block_size];
        const char *base = (const char *)s->pool + inside * token;
        const char *key = base + block_start(s, layer, block, 0) * size;
        const char *value = base + block_start(s, layer, block, 1) * size;
        for (; inside < s->block_size && i < tile->count; inside++, i++, key += token, value += token) {
            tile->keys[i] = key;
            tile->values[i] = value;
        }
    }
}

static inline void prefetch(const char *at, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(at + i, 0, 2);
}

/* Queries of one item and the query heads of KV heads [first_head, first_head + num_heads). */
static int attend_item(const Step *s, int64_t layer, const char *queries, int64_t query_stride, char *out,
                       const int32_t *item, int64_t first_head, int64_t num_heads) {
    const int as_pairs = HAVE_DOT_BF16 && s->dtype == BFLOAT16;
    size_t size = element_size(s->dtype);
    int64_t first_row = item[0], count = item[1], position = item[2], group = s->heads / s->kv_heads;
    const int32_t *table = s->tables + item[3];
    int64_t dim = s->head_dim, rows = count * group, depth = as_pairs ? dim / 2 : dim;
    int64_t width = (dim + GRAIN - 1) / GRAIN * GRAIN, head_bytes = dim * (int64_t)size;
    Scratch scratch;
    if (!reserve(&scratch, num_heads * rows, depth, width)) return 0;

    for (int64_t row = 0; row < num_heads * rows; row++) { /* KV head, then query, then head of the group */
        int64_t head = (first_head + row / rows) * group + row % group, query = first_row + row % rows / group;
        const char *at = queries + (query * query_stride + head * dim) * size;
        uint32_t *packed = scratch.queries + row * depth;
        if (as_pairs || s->dtype == FLOAT32) memcpy(packed, at, head_bytes);
        else
            for (int64_t d = 0; d < dim; d++) packed[d] = (uint32_t)((const bf16 *)at)[d] << 16;
        scratch.peaks[row] = -INFINITY;
        scratch.totals[row] = (vf){0};
    }
    memset(scratch.sums, 0, num_heads * rows * width * sizeof(float));

    float scale = (float)(1.4426950408889634 / sqrt((double)dim)); /* scores in units of log 2 */
    int64_t end = position + count;
    Tile tiles[2], *tile = &tiles[0], *next = &tiles[1];
    locate(s, layer, table, 0, end, tile);
    for (int64_t start = 0; start < end; start += TILE) {
        int64_t keys = tile->count, padded = (keys + GRAIN - 1) / GRAIN * GRAIN;
        next->count = 0;
        if (start + TILE < end) locate(s, layer, table, start + TILE, end, next);
        for (int64_t head = first_head; head < first_head + num_heads; head++) {
            const char *key_at[TILE], *value_at[TILE];
            for (int64_t i = 0; i < keys; i++) {
                key_at[i] = tile->keys[i] + head * head_bytes;
                value_at[i] = tile->values[i] + head * head_bytes;
            }
            for (int64_t i = 0; i < next->count; i++) {
                prefetch(next->keys[i] + head * head_bytes, head_bytes);
                prefetch(next->values[i] + head * head_bytes, head_bytes);
            }
            pack(&scratch, key_at, value_at, keys, padded, dim, width, (int)s->dtype, as_pairs);
            int64_t base = (head - first_head) * rows;
            for (int64_t row = 0; row < rows; row += MAX_ROWS) {
                int64_t block = rows - row < MAX_ROWS ? rows - row : MAX_ROWS;
                multiply(scratch.queries + (base + row) * depth, depth, scratch.keys, TILE, depth, scratch.scores, TILE,
                         0, block, padded, as_pairs);
                for (int64_t r = 0; r < block; r++)
                    soften(&scratch, base + row + r, scratch.scores + r * TILE, scratch.weights + r * TILE, padded,
                           position + (row + r) / group + 1 - start, scale, width, as_pairs);
                multiply(scratch.weights, TILE, scratch.values, width, as_pairs ? padded / 2 : padded,
                         scratch.sums + (base + row) * width, width, 1, block, width, as_pairs);
            }
        }
        Tile *swapped = tile;
        tile = next;
        next = swapped;
    }

    for (int64_t row = 0; row < num_heads * rows; row++) {
        int64_t head = (first_head + row / rows) * group + row % group, query = first_row + row % rows / group;
        int64_t at = (query * s->heads + head) * dim;
        float inverse = 1.0f / sum_vec(scratch.totals[row]);
        for (int64_t d = 0; d < dim; d += LANES) /* + 0: a zero has one sign, however many masked keys were added */
            store_vec(out, at + d, dim - d, (int)s->dtype, *(vf *)(scratch.sums + row * width + d) * inverse + 0.0f);
    }
    return 1;
}

/* Attention of every item. `queries`: rotated, rows `query_stride` elements apart. `out`: [num_rows, heads, head_dim].
 * An item lies inside one tile of queries (its positions / TILE are equal). Returns 0 when memory ran out. */
int terazi_attend(const Step *s, int64_t layer, const void *queries, int64_t query_stride, void *out) {
    /* One pass over all heads of a token reads memory in order; one head at a time keeps many queries in the cache. */
    int64_t step = s->num_items >= s->threads && s->heads * s->num_rows <= 24 * s->num_items ? s->kv_heads : 1;
    int64_t parts = s->kv_heads / step, units = s->num_items * parts;
    int ok = 1;
#pragma omp parallel for num_threads((int)s->threads) if (s->threads > 1 && units > 1) schedule(dynamic) reduction(&& : ok)
    for (int64_t unit = 0; unit < units; unit++)
        ok = attend_item(s, layer, queries, query_stride, out, s->items + unit / parts * 4, unit % parts * step, step) && ok;
    return ok;
}

/* ---- matrix products in bfloat16 --------------------------------------------------------------------------------- */

#define PANEL 64 /* output features of one panel of a packed weight */

/* [rows, depth] of bfloat16 to panels [rows / PANEL, depth / 2, PANEL] of pairs, so that lanes are output features.
 * Features after the last are zero. depth is even. */
void terazi_pack_linear(const bf16 *weight, uint32_t *packed, int64_t rows, int64_t depth) {
    int64_t pairs = depth / 2, panels = (rows + PANEL - 1) / PANEL;
    for (int64_t panel = 0; panel < panels; panel++)
        for (int64_t first = 0; first < pairs; first += 16) /* by cache lines of the weight */
            for (int64_t i = 0; i < PANEL; i++) {
                int64_t row = panel * PANEL + i;
                for (int64_t k = first; k < pairs && k < first + 16; k++) {
                    uint32_t *out = packed + (panel * pairs + k) * PANEL + i;
                    if (row < rows) memcpy(out, weight + row * depth + 2 * k, 4);
                    else *out = 0;
                }
            }
}

static inline vf add_bias(vf x, const bf16 *bias, int64_t at, int64_t count) {
    return bias ? x + load_vec(bias, at, count, BFLOAT16) : x;
}

/* out[rows, features] = in[rows, depth] * weight^T + bias; with `gated`, silu of that, times the same with the second
 * half of the weight and of the bias. Each output is one chain of additions over the depth, however many rows there
 * are, and is rounded to bfloat16 unless `wide`. Returns 0 without AVX512_BF16. */
int terazi_linear(const uint32_t *in, const uint32_t *weight, const bf16 *bias, void *out, int64_t rows,
                  int64_t features, int64_t depth, int64_t gated, int64_t wide, int64_t threads) {
#if !HAVE_DOT_BF16
    (void)in, (void)weight, (void)bias, (void)out, (void)rows, (void)features, (void)depth, (void)gated, (void)wide,
        (void)threads;
    return 0;
#else
    int64_t pairs = depth / 2, panels = (features + PANEL - 1) / PANEL;
#pragma omp parallel for num_threads((int)threads) if (threads > 1) schedule(static)
    for (int64_t panel = 0; panel < panels; panel++) {
        const uint32_t *first = weight + panel * pairs * PANEL, *second = first + panels * pairs * PANEL;
        float main[MAX_ROWS * PANEL] __attribute__((aligned(64))), other[MAX_ROWS * PANEL] __attribute__((aligned(64)));
        for (int64_t row = 0, count; row < rows; row += count) {
            int64_t blocks = (rows - row + MAX_ROWS - 1) / MAX_ROWS;
            count = (rows - row + blocks - 1) / blocks; /* blocks of about one size */
            const uint32_t *left = in + row * pairs;
            multiply(left, pairs, first, PANEL, pairs, main, PANEL, 0, count, PANEL, 1);
            if (gated) multiply(left, pairs, second, PANEL, pairs, other, PANEL, 0, count, PANEL, 1);
            for (int64_t r = 0; r < count; r++)
                for (int64_t i = 0; i < PANEL; i += LANES) {
                    int64_t at = panel * PANEL + i, num = features - at;
                    if (num <= 0) break;
                    vf x = add_bias(*(vf *)(main + r * PANEL + i), bias, at, num);
                    if (gated) { /* silu(x) y = x y / (1 + e^-x), with e^-|x|, which cannot overflow */
                        vf y = add_bias(*(vf *)(other + r * PANEL + i), bias, features + at, num);
                        vf size = choose(x < 0, -x, x), e = exp2_vec(size * -1.44269504f);
                        x = x * y * choose(x < 0, e, splat(1.0f)) / (e + 1.0f);
                    }
                    store_vec(out, (row + r) * features + at, num, wide ? FLOAT32 : BFLOAT16, x);
                }
        }
    }
    return 1;
#endif
}

/* Whether terazi_linear works. */
int64_t terazi_has_linear(void) { return HAVE_DOT_BF16; }

/* What the loader checks before anything else: the layout of Step. */
int64_t terazi_step_size(void) { return (int64_t)sizeof(Step); }
