// The exchange of replicas that share their experts, over memory that peers write into. Two launches a layer: rows go
// to all ranks with the ids and weights of their experts, and each rank's sums go back, where they are added to the
// residual and normalised. The specification is plait_kernels.collective.expert_exchange_reference.
//
// The data are their own flags: memory that nobody has written holds EMPTY, so a reader waits until a word differs, and
// empties what it has read. A rank writes to a place again only when the peer has emptied it: between two launches that
// send a rank's rows lies the one in which it takes the sums that every peer made of them, and a peer sends its sums
// after the launch in which it took the rows; the same holds for sums.
//
// How many rows each rank sends is in device memory, so that a captured launch serves any step. Rows of no request are
// neither sent nor given to an expert. All blocks of a launch are resident at once, since they wait for the peers'.

#ifndef VECTORS
#define VECTORS 1
#endif
#ifndef TOP_K
#define TOP_K 6
#endif

#include "block_sum.cuh"
#include "pdl.cuh"
#include "peer_vectors.cuh"

typedef long long Long;

constexpr int META_VECTORS = (2 * TOP_K + 3) / 4;

// In device memory, one for each rank; the host writes it once.
struct State {
    unsigned rank, world;
    unsigned long long capacity;     // rows that a rank sends at most
    unsigned long long row_vectors;  // of a row's elements
    unsigned long long spin_nanoseconds;
    unsigned* report;         // on the host: is lost, rank, peer, place
    uint4* memory[MAX_RANKS];  // of each rank: [world - 1][capacity] rows with ids and weights, then as many sums
    mutable unsigned has_lost_peer;  // as the report, which is too far away for thousands of threads that wait
};

// In device memory; the host writes it before each step.
struct Step {
    int counts[MAX_RANKS];  // rows that each rank sends
    int num_first;          // own rows are the first ones, so many,
    int second_begin;       // and those from here on
};

// Waits until a peer has written a vector, and empties its place. A peer that does not write within the limit is
// reported, and nothing is waited for from then on: the host ends the process.
__device__ uint4 take(uint4* address, const State& state, unsigned source, unsigned place) {
    uint4 vector = peek(address);
    if (!is_there(vector)) {
        volatile unsigned* report = state.report;
        const unsigned long long limit = now() + state.spin_nanoseconds;
        for (unsigned spins = 1; !is_there(vector = peek(address)); ++spins) {
            if (spins % SPINS_BETWEEN_LOOKS) continue;
            if (*static_cast<const volatile unsigned*>(&state.has_lost_peer)) break;
            if (now() < limit) continue;
            report[1] = state.rank, report[2] = source, report[3] = place;
            __threadfence_system();
            report[0] = 1;
            state.has_lost_peer = 1;
            break;
        }
    }
    *address = {EMPTY, EMPTY, EMPTY, EMPTY};
    return vector;
}

// Where a rank's rows, or its sums, lie in the memory of their receiver.
class Places {
   public:
    __device__ Places(const State* state, unsigned place) : state_(*state), place_(place) {}

    __device__ Long row_vectors() const { return state_.row_vectors; }

    __device__ Long sent_vectors() const { return state_.row_vectors + META_VECTORS; }

    __device__ uint4* row(unsigned owner, unsigned source, Long row, Long vector) const {
        return state_.memory[owner] + (region(owner, source) * state_.capacity + row) * sent_vectors() + vector;
    }

    __device__ uint4* sum(unsigned owner, unsigned source, Long row, Long vector) const {
        const Long before = (state_.world - 1ll) * state_.capacity * sent_vectors();
        return state_.memory[owner] + before + (region(owner, source) * state_.capacity + row) * row_vectors() + vector;
    }

    __device__ uint4 take_from(unsigned source, uint4* address) const { return take(address, state_, source, place_); }

   private:
    __device__ static Long region(unsigned owner, unsigned source) { return source < owner ? source : source - 1; }

    const State& state_;
    const unsigned place_;
};

// Which of a step's rows a rank sends.
class Sent {
   public:
    __device__ Sent(const Step& step, unsigned rank)
        : count(step.counts[rank]), num_first_(step.num_first), second_begin_(step.second_begin) {}

    // The step's row that is sent as number `sent`.
    __device__ Long row(Long sent) const { return sent < num_first_ ? sent : sent - num_first_ + second_begin_; }

    // As which number a row is sent; -1 if it is not.
    __device__ Long number(Long row) const {
        if (row < num_first_) return row < count ? row : -1;
        const Long sent = row - second_begin_ + num_first_;
        return row >= second_begin_ && sent < count ? sent : -1;
    }

    const Long count;

   private:
    const Long num_first_, second_begin_;
};

// Rows of all ranks: `stride` of each, of which those that it sent come first.
struct Gathered {
    uint4* x;
    float* weights;
    Long* experts;  // counted from the first that this rank holds; -1 for others'
    Long row_vectors, first_held, num_held;

    __device__ void keep(Long row, Long vector, uint4 value) const {
        if (vector < row_vectors) {
            x[row * row_vectors + vector] = value;
            return;
        }
        const unsigned words[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const Long word = 4 * (vector - row_vectors) + i;
            if (word < TOP_K) {
                weights[row * TOP_K + word] = __uint_as_float(words[i]);
            } else if (word < 2 * TOP_K) {
                const Long expert = static_cast<Long>(words[i]) - first_held;
                experts[row * TOP_K + word - TOP_K] = 0 <= expert && expert < num_held ? expert : -1;
            }
        }
    }

    __device__ void leave_out(Long row) const {
        for (int choice = threadIdx.x; choice < TOP_K; choice += blockDim.x) experts[row * TOP_K + choice] = -1;
    }
};

// Weights, then ids, of a row's experts.
__device__ uint4 meta(const float* weights, const Long* experts, Long row, Long vector) {
    unsigned words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const Long word = 4 * vector + i;
        words[i] = word < TOP_K       ? __float_as_uint(weights[row * TOP_K + word])
                   : word < 2 * TOP_K ? static_cast<unsigned>(experts[row * TOP_K + word - TOP_K])
                                      : 0u;
    }
    return filled(uint4{words[0], words[1], words[2], words[3]});
}

extern "C" __global__ void __launch_bounds__(1024, 1)
    gather_rows(const uint4* x, const float* weights, const Long* experts, uint4* all_x, float* all_weights,
                Long* all_experts, Long stride, Long first_held, Long num_held, const Step* step, Long place,
                const State* state) {
    let_the_next_kernel_begin();
    const Places places(state, static_cast<unsigned>(place));
    const unsigned rank = state->rank, world = state->world;
    const Gathered gathered = {all_x, all_weights, all_experts, places.row_vectors(), first_held, num_held};
    wait_for_the_kernel_before();
    const Sent own(*step, rank);
    for (Long sent = blockIdx.x; sent < own.count; sent += gridDim.x) {
        const Long row = own.row(sent);
        for (Long i = threadIdx.x; i < places.sent_vectors(); i += blockDim.x) {
            const bool is_x = i < places.row_vectors();
            const uint4 value = is_x ? filled(x[row * places.row_vectors() + i])
                                     : meta(weights, experts, row, i - places.row_vectors());
            for (unsigned peer = 0; peer < world; ++peer)
                if (peer != rank) push(places.row(peer, rank, sent, i), value);
            gathered.keep(rank * stride + sent, i, value);
        }
    }
    for (unsigned source = 0; source < world; ++source) {
        const Long count = step->counts[source];
        for (Long sent = blockIdx.x; sent < stride; sent += gridDim.x) {
            if (sent >= count) {
                gathered.leave_out(source * stride + sent);
            } else if (source != rank) {
                for (Long i = threadIdx.x; i < places.sent_vectors(); i += blockDim.x)
                    gathered.keep(source * stride + sent, i,
                                  places.take_from(source, places.row(rank, source, sent, i)));
            }
        }
    }
}

// What this rank's experts made of the gathered rows.
struct Parts {
    const uint4* parts;    // of each pair of a row and an expert; or of each row, already weighted and summed
    const Long* index;     // at which of `parts` a pair is; null if in order
    const float* weights;  // null if the parts are sums
    const Long* experts;
    Long row_vectors;

    __device__ void add_to(float (&sum)[8], Long row, Long column) const {
        if (!weights) {
            add(sum, parts[row * row_vectors + column]);
            return;
        }
        uint4 part[TOP_K];
        float weight[TOP_K];
#pragma unroll
        for (int i = 0; i < TOP_K; ++i) {  // all loads first
            const Long pair = row * TOP_K + i;
            const bool is_held = experts[pair] >= 0;
            weight[i] = is_held ? weights[pair] : 0.0f;
            part[i] = is_held ? parts[(index ? index[pair] : pair) * row_vectors + column] : uint4{0, 0, 0, 0};
        }
#pragma unroll
        for (int i = 0; i < TOP_K; ++i) add(sum, part[i], weight[i]);
    }
};

__device__ float squares_of(uint4 vector) {
    const unsigned words[4] = {vector.x, vector.y, vector.z, vector.w};
    float squares = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) squares += low(words[i]) * low(words[i]) + high(words[i]) * high(words[i]);
    return squares;
}

__device__ uint4 scaled(uint4 total, float scale, uint4 weight) {
    const unsigned words[4] = {total.x, total.y, total.z, total.w};
    const unsigned by[4] = {weight.x, weight.y, weight.z, weight.w};
    unsigned made[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
        made[i] = pack(low(words[i]) * scale * low(by[i]), high(words[i]) * scale * high(by[i]));
    return {made[0], made[1], made[2], made[3]};
}

// `sum` is that of all ranks' parts, `dense` and `residual`; `normed` its RMS norm. A row that was not sent has no
// parts. A thread has VECTORS vectors of a row.
extern "C" __global__ void __launch_bounds__(1024, 1)
    return_sums_add_rms_norm(const uint4* parts, const Long* index, const float* weights, const Long* experts,
                             Long stride, const uint4* dense, const uint4* residual, const uint4* weight,
                             uint4* normed, uint4* sum, Long num_rows, double eps, const Step* step, Long place,
                             const State* state) {
    let_the_next_kernel_begin();
    const Places places(state, static_cast<unsigned>(place));
    const unsigned rank = state->rank, world = state->world;
    const Long width = places.row_vectors();
    const Parts made = {parts, index, weights, experts, width};
    uint4 by[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const Long column = threadIdx.x + static_cast<Long>(i) * blockDim.x;
        if (column < width) by[i] = weight[column];
    }
    wait_for_the_kernel_before();
    for (unsigned ahead = 1; ahead < world; ++ahead) {
        const unsigned peer = (rank + ahead) % world;
        const Long count = step->counts[peer];
        for (Long sent = blockIdx.x; sent < count; sent += gridDim.x)
            for (Long column = threadIdx.x; column < width; column += blockDim.x) {
                float partial[8] = {};
                made.add_to(partial, peer * stride + sent, column);
                push(places.sum(peer, rank, sent, column), filled(rounded(partial)));
            }
    }
    const Sent own(*step, rank);
    for (Long row = blockIdx.x; row < num_rows; row += gridDim.x) {
        const Long sent = own.number(row);
        uint4 total[VECTORS];
        float squares = 0;
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const Long column = threadIdx.x + static_cast<Long>(i) * blockDim.x;
            if (column >= width) continue;
            float values[8] = {};
            if (dense) add(values, dense[row * width + column]);
            if (sent >= 0)
                for (unsigned source = 0; source < world; ++source) {
                    if (source == rank)
                        made.add_to(values, rank * stride + sent, column);
                    else
                        add(values, places.take_from(source, places.sum(rank, source, sent, column)));
                }
            add(values, residual[row * width + column]);
            total[i] = rounded(values);
            sum[row * width + column] = total[i];
            squares += squares_of(total[i]);
        }
        const float scale = rsqrtf(block_sum(squares) / (8 * width) + static_cast<float>(eps));
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const Long column = threadIdx.x + static_cast<Long>(i) * blockDim.x;
            if (column < width) normed[row * width + column] = scaled(total[i], scale, by[i]);
        }
    }
}
