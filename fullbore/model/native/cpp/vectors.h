// Vectors of floats as wide as the machine has, and what both number types need.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16, MAX_ROWS = 12;  // 12 rows × 2 vectors of sums, of 32 registers
#elif defined(__AVX__)
constexpr int LANES = 8, MAX_ROWS = 6;  // 6 × 2 of 16
#elif defined(__aarch64__)
constexpr int LANES = 4, MAX_ROWS = 12;  // 12 × 2 of 32
#else
constexpr int LANES = 4, MAX_ROWS = 4;
#endif
constexpr int PANEL = 2 * LANES;  // output columns that are computed together

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef int32_t IntVec __attribute__((vector_size(LANES * 4)));
typedef uint16_t bfloat16;

#define INLINE inline __attribute__((always_inline))

INLINE Vec load(const float* from) {
    Vec v;
    std::memcpy(&v, from, sizeof v);
    return v;
}
INLINE void store(float* to, Vec v) { std::memcpy(to, &v, sizeof v); }
INLINE Vec broadcast(float x) { return x - Vec{}; }

INLINE float to_float(float x) { return x; }
INLINE float to_float(bfloat16 x) {
    uint32_t bits = uint32_t(x) << 16;
    float result;
    std::memcpy(&result, &bits, 4);
    return result;
}
INLINE void from_float(float x, float* to) { *to = x; }
INLINE void from_float(float x, bfloat16* to) {  // to the nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    *to = x != x ? 0x7FC0 : bfloat16((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

#if defined(__F16C__) || defined(__aarch64__)
#define HAS_FLOAT16 1
struct float16 {
    uint16_t bits;
};
INLINE Vec widen(const float16* from) {
#if defined(__AVX512F__)
    return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__F16C__)
    return (Vec)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
    typedef __fp16 Halves __attribute__((vector_size(LANES * 2)));
    Halves halves;
    std::memcpy(&halves, from, sizeof halves);
    return __builtin_convertvector(halves, Vec);
#endif
}
INLINE float to_float(float16 x) {
    float16 several[LANES] = {x};
    return widen(several)[0];
}
#else
#define HAS_FLOAT16 0
#endif

// The PANEL weights of one input, as two vectors.
INLINE void load_panel_row(const float* w, Vec& first, Vec& second) { first = load(w), second = load(w + LANES); }
INLINE void load_panel_row(const bfloat16* w, Vec& first, Vec& second) {  // lane i: low half first, high half second
    IntVec pairs, low, high;
    std::memcpy(&pairs, w, sizeof pairs);
    low = pairs << 16, high = pairs & int32_t(0xFFFF0000);
    std::memcpy(&first, &low, sizeof low), std::memcpy(&second, &high, sizeof high);
}

#if HAS_FLOAT16
INLINE void load_panel_row(const float16* w, Vec& first, Vec& second) { first = widen(w), second = widen(w + LANES); }
#endif

// Halves are added to each other until one number is left.
INLINE float sum(Vec v) {
    float parts[LANES];
    store(parts, v);
#pragma GCC unroll 4
    for (int half = LANES / 2; half > 0; half /= 2)
#pragma GCC unroll 8
        for (int i = 0; i < half; i++) parts[i] += parts[i + half];
    return parts[0];
}
INLINE float max(Vec v) {
    float parts[LANES];
    store(parts, v);
#pragma GCC unroll 4
    for (int half = LANES / 2; half > 0; half /= 2)
#pragma GCC unroll 8
        for (int i = 0; i < half; i++) parts[i] = parts[i] > parts[i + half] ? parts[i] : parts[i + half];
    return parts[0];
}

// e^x to 2 units in the last place; exactly 0 below the smallest normal number; NaN stays NaN.
// Range reduction and polynomial as in the Cephes library's expf.
INLINE Vec exp(Vec x) {
    const Vec highest = broadcast(88.3f), lowest = broadcast(-87.3f);
    Vec clamped = x > highest ? highest : x;
    clamped = clamped < lowest ? lowest : clamped;
    const Vec magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const Vec shifted = clamped * 1.44269504088896341f + magic;
    const Vec n = shifted - magic;
    Vec r = clamped - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    Vec p = broadcast(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    IntVec bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    bits = (bits + (127 - 0x4B400000)) << 23;
    Vec power;
    std::memcpy(&power, &bits, sizeof power);
    return x < lowest ? Vec{} : p * power;
}

}  // namespace
