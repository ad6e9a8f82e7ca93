// Samples one token a row from 16-bit logits, one block a row. The specification is plait_kernels.sampling.reference.
//
// 16 bits have few values: tokens are counted by value, and the filters follow from the counts, without a sort. A bin
// is the distance of a value from the row's largest one, which is bin 0.

constexpr int THREADS = 1024;
constexpr int WARPS = THREADS / 32;
// Values further from the largest have weight 0 at any temperature that a request may have. The number of bins of a
// thread is odd, against bank conflicts in shared memory.
constexpr int OWN = 47;
constexpr int BINS = THREADS * OWN;
constexpr int VECTOR = 8;
constexpr int BATCH = 4;
constexpr int OF_LANE = 2 * VECTOR;
constexpr int CHUNK = 32 * OF_LANE;
constexpr float LOG2_E = 1.4426950408889634f;
constexpr long long NO_TOKEN = -1;  // of a row whose logits are NaN or infinite

typedef unsigned short Bits;

// The keys of two tokens, in the halves of a word: keys order as the logits do, -0 equals 0, NaN is the largest.
__device__ unsigned orders(unsigned word) {
#ifdef IS_HALF
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(word) : "r"(word), "r"(0x3c003c00), "r"(0));  // word * 1 + 0
#else
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(word) : "r"(word), "r"(0x3f803f80), "r"(0));
#endif
    return word ^ (0x80008000 | (word >> 15 & 0x00010001) * 0x7fff);
}

__device__ int order(Bits bits) { return orders(bits) & 0xffff; }

__device__ float value(int key) {
    const Bits bits = key < 0x8000 ? 0xffff - key : key - 0x8000;
#ifdef IS_HALF
    float number;
    asm("cvt.f32.f16 %0, %1;" : "=f"(number) : "h"(bits));
    return number;
#else
    return __uint_as_float(static_cast<unsigned>(bits) << 16);
#endif
}

// Visits this lane's ids of [begin, end), which `lanes` share: pairs(id, keys) for two adjacent ids, the second's key
// in the upper half, and single(id, key) for the unaligned rest.
template <class Pairs, class Single>
__device__ void walk(const Bits* row, int begin, int end, int lane, int lanes, Pairs pairs, Single single) {
    const bool is_aligned = reinterpret_cast<unsigned long long>(row + begin) % sizeof(uint4) == 0;
    const int whole = is_aligned ? (end - begin) / VECTOR : 0;
    for (int i = lane; i < whole; i += lanes * BATCH) {
        uint4 loaded[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; ++b)
            loaded[b] = reinterpret_cast<const uint4*>(row + begin)[min(i + b * lanes, whole - 1)];
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const unsigned words[4] = {loaded[b].x, loaded[b].y, loaded[b].z, loaded[b].w};
            const int id = begin + (i + b * lanes) * VECTOR;
            if (i + b * lanes >= whole) break;
#pragma unroll
            for (int j = 0; j < VECTOR / 2; ++j) pairs(id + 2 * j, orders(words[j]));
        }
    }
    for (int id = begin + whole * VECTOR + lane; id < end; id += lanes) single(id, order(row[id]));
}

// Calls use(id, key) for each of them.
template <class Use>
__device__ void each(const Bits* row, int begin, int end, int lane, int lanes, Use use) {
    const auto both = [&](int id, unsigned keys) { use(id, keys & 0xffff), use(id + 1, keys >> 16); };
    walk(row, begin, end, lane, lanes, both, use);
}

template <class Number>
__device__ Number sum_up_to(Number own, Number* of_warps, Number& total) {
    // Exclusive prefix over the threads; the same order at every call.
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Number sum = own;
    for (int step = 1; step < 32; step *= 2) {
        const Number before = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += before;
    }
    __syncthreads();
    if (lane == 31) of_warps[warp] = sum;
    __syncthreads();
    Number before = 0;
    total = 0;
    for (int i = 0; i < WARPS; ++i) {
        if (i == warp) before = total;
        total += of_warps[i];
    }
    return before + sum - own;
}

__device__ int best_key(const Bits* row, int vocab) {
    __shared__ int of_warps[WARPS];
    unsigned of_pairs = 0;
    int best = 0;
    walk(
        row, 0, vocab, threadIdx.x, THREADS, [&](int, unsigned keys) { of_pairs = __vmaxu2(of_pairs, keys); },
        [&](int, int key) { best = max(best, key); });
    best = max(best, static_cast<int>(max(of_pairs & 0xffff, of_pairs >> 16)));
    best = __reduce_max_sync(~0u, best);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = best;
    __syncthreads();
    for (int i = 0; i < WARPS; ++i) best = max(best, of_warps[i]);
    return best;
}

// Whether the row has a softmax: NaN has the largest key, so it would be the largest value.
__device__ bool is_distribution(float top) { return fabsf(top) <= 3.4028235e38f; }

// Tokens of a warp, a multiple of VECTOR.
__device__ int share_of(int vocab) { return ((vocab + WARPS - 1) / WARPS + VECTOR - 1) / VECTOR * VECTOR; }

extern "C" __global__ void __launch_bounds__(THREADS) sample_filtered(
    const Bits* logits, long long stride, long long vocab_size, const float* temperatures, const long long* top_ks,
    const float* top_ps, const float* min_ps, const double* uniforms, long long* out) {
    extern __shared__ int counts[];
    __shared__ double masses[WARPS];
    __shared__ int numbers[WARPS];
    __shared__ int chosen_bin, chosen_place;
    const Bits* row = logits + blockIdx.x * stride;
    const int vocab = static_cast<int>(vocab_size);
    for (int bin = threadIdx.x; bin < BINS; bin += THREADS) counts[bin] = 0;
    const int best = best_key(row, vocab);
    if (!is_distribution(value(best))) {
        if (threadIdx.x == 0) out[blockIdx.x] = NO_TOKEN;
        return;
    }
    __syncthreads();
    each(row, 0, vocab, threadIdx.x, THREADS, [&](int, int key) { atomicAdd(&counts[min(best - key, BINS - 1)], 1); });
    __syncthreads();

    const float temperature = temperatures[blockIdx.x], top_p = top_ps[blockIdx.x], min_p = min_ps[blockIdx.x];
    const long long asked = top_ks[blockIdx.x];
    const int top_k = asked > 0 && asked < vocab ? static_cast<int>(asked) : vocab;
    const float top = value(best);
    const float factor = LOG2_E / temperature;
    auto weight = [&](int bin) { return exp2f((value(best - bin) - top) * factor); };
    int* own = counts + threadIdx.x * OWN;
    const int first = threadIdx.x * OWN;

    // Top-k: of the last value, the tokens with the lowest ids are kept.
    int number = 0, all;
    for (int i = 0; i < OWN; ++i) number += own[i];
    int left = top_k - sum_up_to(number, numbers, all);
    double mass = 0, total;
    for (int i = 0; i < OWN; ++i) {
        const int kept = max(0, min(own[i], left));
        left -= own[i];
        own[i] = kept;
        if (kept) mass += kept * static_cast<double>(weight(first + i));
    }
    // Top-p: a token is kept while the mass before it is below p of what top-k kept.
    double before = sum_up_to(mass, masses, total);
    const double needed = static_cast<double>(top_p) * total;
    double kept_mass = 0;
    for (int i = 0; i < OWN; ++i) {
        if (own[i] == 0) continue;
        const float each_weight = weight(first + i);
        const double own_mass = own[i] * static_cast<double>(each_weight);
        if (top_p < 1) {
            const double room = each_weight > 0 ? ceil((needed - before) / each_weight) : 0;
            own[i] = static_cast<int>(fmax(first + i == 0 ? 1.0 : 0.0, fmin(room, static_cast<double>(own[i]))));
        }
        if (each_weight < min_p) own[i] = 0;
        kept_mass += own[i] * static_cast<double>(each_weight);
        before += own_mass;
    }
    // The first token whose cumulative mass exceeds the target, or the last of nonzero weight.
    double sum = sum_up_to(kept_mass, masses, total);
    const double target = uniforms[blockIdx.x] * total;
    if (threadIdx.x == 0) chosen_bin = -1;
    int last = -1;
    __syncthreads();
    for (int i = 0; i < OWN; ++i) {
        if (own[i] == 0) continue;
        const double each_weight = weight(first + i);
        if (each_weight == 0) continue;
        last = first + i;
        const double after = sum + own[i] * each_weight;
        if (sum <= target && target < after) {
            chosen_bin = first + i;
            chosen_place = min(own[i] - 1, static_cast<int>((target - sum) / each_weight));
            break;
        }
        sum = after;
    }
    last = __reduce_max_sync(~0u, last);
    if (threadIdx.x % 32 == 0) numbers[threadIdx.x / 32] = last;
    __syncthreads();
    for (int i = 0; i < WARPS; ++i) last = max(last, numbers[i]);
    last = max(last, 0);
    const bool is_found = chosen_bin >= 0;
    const int bin = is_found ? chosen_bin : last;
    const int place = min(is_found ? chosen_place : BINS, counts[bin] - 1);

    // The token of this value with so many equal ones before it.
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, share = share_of(vocab);
    const int begin = min(warp * share, vocab), end = min(begin + share, vocab);
    int matches = 0;
    each(row, begin, end, lane, 32, [&](int, int key) { matches += best - key == bin; });
    matches = __reduce_add_sync(~0u, matches);
    __syncthreads();
    if (lane == 0) numbers[warp] = matches;
    __syncthreads();
    int wanted = place;
    for (int i = 0; i < warp; ++i) wanted -= numbers[i];
    if (wanted < 0 || wanted >= matches) return;
    for (int id = begin + lane; id - lane < end; id += 32) {
        const bool is_match = id < end && best - order(row[id]) == bin;
        const unsigned found = __ballot_sync(~0u, is_match);
        if (is_match && __popc(found & ((1u << lane) - 1)) == wanted) out[blockIdx.x] = id;
        wanted -= __popc(found);
    }
}

__device__ float number(Bits bits) { return value(order(bits)); }

// The weights of a lane's tokens of a chunk, in the order of the ids; 0 after the row's end.
template <class Weight>
__device__ void chunk_weights(const Bits* row, int vocab, int chunk, Weight weight, float (&given)[OF_LANE]) {
    const int id = chunk * CHUNK + threadIdx.x % 32 * OF_LANE;
    const bool is_whole = id + OF_LANE <= vocab && reinterpret_cast<unsigned long long>(row + id) % sizeof(uint4) == 0;
    if (!is_whole) {
#pragma unroll
        for (int j = 0; j < OF_LANE; ++j) given[j] = id + j < vocab ? weight(number(row[id + j])) : 0.0f;
        return;
    }
#pragma unroll
    for (int part = 0; part < OF_LANE / VECTOR; ++part) {
        const uint4 four = reinterpret_cast<const uint4*>(row + id)[part];
        const unsigned words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int j = 0; j < VECTOR; j += 2) {
            const unsigned word = words[j / 2];
#ifdef IS_HALF
            const float first = number(word & 0xffff), second = number(word >> 16);
#else
            const float first = __uint_as_float(word << 16), second = __uint_as_float(word & 0xffff0000);
#endif
            given[part * VECTOR + j] = weight(first);
            given[part * VECTOR + j + 1] = weight(second);
        }
    }
}

__device__ float exp2_fast(float power) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(power));
    return result;
}

extern "C" __global__ void __launch_bounds__(THREADS) sample_random(
    const Bits* logits, long long stride, long long vocab_size, const float* temperatures, const float* min_ps,
    const double* uniforms, long long* out) {
    extern __shared__ double of_chunks[];
    __shared__ double masses[WARPS];
    __shared__ int chosen, last_chunks[WARPS];
    const Bits* row = logits + blockIdx.x * stride;
    const int vocab = static_cast<int>(vocab_size);
    const float factor = LOG2_E / temperatures[blockIdx.x], min_p = min_ps[blockIdx.x];
    const float top = value(best_key(row, vocab));
    if (!is_distribution(top)) {
        if (threadIdx.x == 0) out[blockIdx.x] = NO_TOKEN;
        return;
    }
    auto weight = [&](float logit) {
        const float given = exp2_fast((logit - top) * factor);
        return given < min_p ? 0.0f : given;
    };
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, num_chunks = (vocab + CHUNK - 1) / CHUNK;
#pragma unroll 4
    for (int chunk = warp; chunk < num_chunks; chunk += WARPS) {
        // A few weights are added in float32: the rounding is far below one token's weight on average.
        float given[OF_LANE], few[OF_LANE / VECTOR] = {};
        chunk_weights(row, vocab, chunk, weight, given);
#pragma unroll
        for (int j = 0; j < OF_LANE; ++j) few[j / VECTOR] += given[j];
        double mass = 0;
        for (float part : few) mass += part;
        for (int step = 16; step > 0; step /= 2) mass += __shfl_xor_sync(~0u, mass, step);
        if (lane == 0) of_chunks[chunk] = mass;
    }
    __syncthreads();
    // The first chunk whose end exceeds the target, or the last of nonzero weight.
    const int per_thread = (num_chunks + THREADS - 1) / THREADS;
    const int begin = min(static_cast<int>(threadIdx.x) * per_thread, num_chunks);
    const int end = min(begin + per_thread, num_chunks);
    double own = 0, total;
    int last = -1;
    for (int chunk = begin; chunk < end; ++chunk) {
        own += of_chunks[chunk];
        if (of_chunks[chunk] > 0) last = chunk;
    }
    double sum = sum_up_to(own, masses, total);
    const double target = uniforms[blockIdx.x] * total;
    last = __reduce_max_sync(~0u, last);
    if (lane == 0) last_chunks[warp] = last;
    __syncthreads();
    for (int i = 0; i < WARPS; ++i) last = max(last, last_chunks[i]);
    if (threadIdx.x == 0) chosen = max(last, 0);
    __syncthreads();
    for (int chunk = begin; chunk < end; ++chunk) {
        sum += of_chunks[chunk];
        if (sum > target) {
            atomicMin(&chosen, chunk);
            break;
        }
    }
    __syncthreads();
    // One warp adds the mass before that chunk again, and finds the token in it.
    if (warp > 0) return;
    double before = 0;
    for (int chunk = lane; chunk < chosen; chunk += 32) before += of_chunks[chunk];
    for (int step = 16; step > 0; step /= 2) before += __shfl_xor_sync(~0u, before, step);
    float given[OF_LANE];
    double lower = 0;
    chunk_weights(row, vocab, chosen, weight, given);
    for (int j = 0; j < OF_LANE; ++j) lower += given[j];
    const double own_mass = lower;
    for (int step = 1; step < 32; step *= 2) {
        const double other = __shfl_up_sync(~0u, lower, step);
        if (lane >= step) lower += other;
    }
    lower += before - own_mass;
    int first = vocab, highest = -1;
    for (int j = 0; j < OF_LANE; ++j) {
        lower += given[j];
        const int id = chosen * CHUNK + lane * OF_LANE + j;
        if (given[j] > 0) highest = id;
        if (given[j] > 0 && lower > target) first = min(first, id);
    }
    first = __reduce_min_sync(~0u, first);
    highest = __reduce_max_sync(~0u, highest);
    if (lane == 0) out[blockIdx.x] = first < vocab ? first : max(highest, 0);
}

// Changes of rows' logits (plait_kernels.sampling.adjust): penalties and biases, in float32 and rounded once.
constexpr float MOST_ADJUSTED = 20000.0f;
constexpr float NOT_ALLOWED = -60000.0f;

__device__ float raw_number(Bits bits) {
#ifdef IS_HALF
    float number;
    asm("cvt.f32.f16 %0, %1;" : "=f"(number) : "h"(bits));
    return number;
#else
    return __uint_as_float(static_cast<unsigned>(bits) << 16);
#endif
}

__device__ Bits rounded(float number) {
    Bits bits;
#ifdef IS_HALF
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(number));
#else
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(number));
#endif
    return bits;
}

__device__ float penalise(float logit, int count, float presence, float frequency, float repetition) {
    if (count == 0) return logit;
    const int times = count >> 1;
    logit = logit > 0 ? logit / repetition : logit * repetition;
    logit -= frequency * static_cast<float>(times);
    if (times > 0) logit -= presence;
    if (logit > MOST_ADJUSTED) return MOST_ADJUSTED;
    return logit < -MOST_ADJUSTED ? -MOST_ADJUSTED : logit;  // NaN stays
}

extern "C" __global__ void __launch_bounds__(THREADS) adjust_logits(
    const Bits* logits, long long stride, long long vocab_size, const int* counts, const long long* count_rows,
    const float* penalties, const long long* ends, const long long* ids, const float* biases, const bool* only_listed,
    Bits* out) {
    const Bits* row = logits + blockIdx.x * stride;
    const int* counted = counts + count_rows[blockIdx.x] * vocab_size;
    Bits* adjusted = out + blockIdx.x * vocab_size;
    const float presence = penalties[3 * blockIdx.x], frequency = penalties[3 * blockIdx.x + 1];
    const float repetition = penalties[3 * blockIdx.x + 2];
    const int vocab = static_cast<int>(vocab_size);
    auto change = [&](Bits bits, int count) {
        return count == 0 ? bits : rounded(penalise(raw_number(bits), count, presence, frequency, repetition));
    };
    if (only_listed[blockIdx.x]) {
        const Bits closed = rounded(NOT_ALLOWED);
        for (int id = threadIdx.x; id < vocab; id += THREADS) adjusted[id] = closed;
    } else {
        const auto address = [](const void* pointer) { return reinterpret_cast<unsigned long long>(pointer); };
        const bool is_aligned = (address(row) | address(counted) | address(adjusted)) % sizeof(uint4) == 0;
        const int whole = is_aligned ? vocab / VECTOR : 0;
        for (int i = threadIdx.x; i < whole; i += THREADS) {
            const int4 low = reinterpret_cast<const int4*>(counted)[2 * i];
            const int4 high = reinterpret_cast<const int4*>(counted)[2 * i + 1];
            uint4 eight = reinterpret_cast<const uint4*>(row)[i];
            if ((low.x | low.y | low.z | low.w | high.x | high.y | high.z | high.w) != 0) {
                const int of_each[VECTOR] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
                unsigned words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
                for (int j = 0; j < VECTOR / 2; ++j) {
                    const unsigned lower = change(static_cast<Bits>(words[j] & 0xffff), of_each[2 * j]);
                    const unsigned upper = change(static_cast<Bits>(words[j] >> 16), of_each[2 * j + 1]);
                    words[j] = lower | upper << 16;
                }
                eight = make_uint4(words[0], words[1], words[2], words[3]);
            }
            reinterpret_cast<uint4*>(adjusted)[i] = eight;
        }
        for (int id = whole * VECTOR + threadIdx.x; id < vocab; id += THREADS)
            adjusted[id] = change(row[id], counted[id]);
    }
    __syncthreads();
    const long long begin = blockIdx.x > 0 ? ends[blockIdx.x - 1] : 0;
    for (long long e = begin + threadIdx.x; e < ends[blockIdx.x]; e += THREADS) {
        const long long id = ids[e];
        const float penalised = penalise(raw_number(row[id]), counted[id], presence, frequency, repetition);
        adjusted[id] = rounded(penalised + biases[e]);
    }
}

// Logits of a row whose mask lacks a token (plait_kernels.sampling.mask). A thread takes the tokens of a word's quarter.
extern "C" __global__ void __launch_bounds__(THREADS) mask_logits(
    const Bits* logits, long long stride, long long vocab_size, const unsigned* masks, long long num_words,
    const long long* mask_rows, Bits* out) {
    const Bits* row = logits + blockIdx.x * stride;
    const unsigned* mask = masks + mask_rows[blockIdx.x] * num_words;
    Bits* masked = out + blockIdx.x * vocab_size;
    const Bits closed = rounded(NOT_ALLOWED);
    const int vocab = static_cast<int>(vocab_size);
    const auto address = [](const void* pointer) { return reinterpret_cast<unsigned long long>(pointer); };
    const int whole = (address(row) | address(masked)) % sizeof(uint4) == 0 ? vocab / VECTOR : 0;
    for (int i = threadIdx.x; i < whole; i += THREADS) {
        const unsigned bits = mask[i / 4] >> (i % 4 * VECTOR) & 0xff;
        uint4 eight = bits == 0 ? make_uint4(0, 0, 0, 0) : reinterpret_cast<const uint4*>(row)[i];
        if (bits != 0xff) {
            unsigned words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
            for (int j = 0; j < VECTOR / 2; ++j) {
                const unsigned lower = bits >> (2 * j) & 1 ? words[j] & 0xffff : closed;
                const unsigned upper = bits >> (2 * j + 1) & 1 ? words[j] >> 16 : closed;
                words[j] = lower | upper << 16;
            }
            eight = make_uint4(words[0], words[1], words[2], words[3]);
        }
        reinterpret_cast<uint4*>(masked)[i] = eight;
    }
    for (int id = whole * VECTOR + threadIdx.x; id < vocab; id += THREADS)
        masked[id] = mask[id / 32] >> (id % 32) & 1 ? row[id] : closed;
}

// Philox4x32-10 (plait_kernels.sampling.philox): one number in [0, 1) for each seed and index.
extern "C" __global__ void uniform(const long long* seeds, const long long* indices, long long number, double* out) {
    const long long row = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (row >= number) return;
    unsigned key_0 = static_cast<unsigned>(seeds[row]), key_1 = static_cast<unsigned>(seeds[row] >> 32);
    unsigned words[4] = {static_cast<unsigned>(indices[row]), static_cast<unsigned>(indices[row] >> 32), 0, 0};
    for (int round = 0; round < 10; ++round) {
        const unsigned long long first = 0xD2511F53ull * words[0], second = 0xCD9E8D57ull * words[2];
        words[0] = static_cast<unsigned>(second >> 32) ^ words[1] ^ key_0;
        words[2] = static_cast<unsigned>(first >> 32) ^ words[3] ^ key_1;
        words[1] = static_cast<unsigned>(second);
        words[3] = static_cast<unsigned>(first);
        key_0 += 0x9E3779B9u;
        key_1 += 0xBB67AE85u;
    }
    const unsigned long long bits = static_cast<unsigned long long>(words[0] >> 5) << 26 | words[1] >> 6;
    out[row] = static_cast<double>(bits) * 0x1p-53;
}
