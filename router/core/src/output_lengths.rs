//! How long answers are, by those that ended by themselves (Kaplan-Meier).

/// Half octaves of lengths, from 1, 1.5, 2, 3, 4, 6, 8, 12 on.
const NUM_BUCKETS: usize = 64;
/// Answers after which older ones count half.
const HALF_LIFE: f64 = 1024.0;
/// Answers of unknown length that are assumed beside the seen ones.
const NUM_PRIOR: f64 = 1.0;
/// The same where no answer has got to yet.
const NUM_PRIOR_UNSEEN: f64 = 8.0;
/// An answer is expected to end here, or at twice its length, if nothing else is known. Few requests use all
/// of a large `max_tokens`.
const MAX_PRIOR: u32 = 2048;

/// How many answers reached each length, and how many ended by themselves from there to the next.
#[derive(Clone, Debug)]
pub(crate) struct OutputLengths {
    reached: [f64; NUM_BUCKETS],
    ended: [f64; NUM_BUCKETS],
    /// Share of answers that reach each bucket's first length.
    survival: [f64; NUM_BUCKETS + 1],
    /// Mean tokens of an answer that is cut there.
    mean: [f64; NUM_BUCKETS + 1],
}

impl OutputLengths {
    pub(crate) fn new() -> Self {
        let mut lengths = Self {
            reached: [0.0; NUM_BUCKETS],
            ended: [0.0; NUM_BUCKETS],
            survival: [1.0; NUM_BUCKETS + 1],
            mean: [0.0; NUM_BUCKETS + 1],
        };
        lengths.fit();
        lengths
    }

    /// An answer has so many tokens now.
    pub(crate) fn observe_token(&mut self, num_tokens: u32) {
        if begins_bucket(num_tokens) {
            self.reached[bucket_of(num_tokens)] += 1.0;
        }
    }

    /// An answer has ended by itself after so many tokens.
    pub(crate) fn observe_end(&mut self, num_tokens: u32) {
        self.ended[bucket_of(num_tokens)] += 1.0;
        if self.reached[0] > HALF_LIFE {
            for count in self.reached.iter_mut().chain(&mut self.ended) {
                *count /= 2.0;
            }
        }
        self.fit();
    }

    /// Answers that get farther than any so far are taken to end as fast as those before them: until some have,
    /// short answers under a large `max_tokens` would keep the pool half empty.
    fn fit(&mut self) {
        let last = self.reached.iter().rposition(|num| *num > 0.0);
        let last = last.unwrap_or(NUM_BUCKETS);
        // Each half octave counts twice as much as the one before it.
        let (mut num_ended, mut num_reached) = (0.0, 0.0);
        for bucket in 0..NUM_BUCKETS {
            let ends = if bucket > last {
                num_ended / (num_reached + NUM_PRIOR_UNSEEN)
            } else {
                self.ended[bucket] / (self.reached[bucket] + NUM_PRIOR)
            };
            num_ended = num_ended / 2.0 + self.ended[bucket];
            num_reached = num_reached / 2.0 + self.reached[bucket];
            let (before, after) = (self.survival[bucket], self.survival[bucket] * (1.0 - ends));
            self.survival[bucket + 1] = after.max(f64::MIN_POSITIVE);
            let width = start_of(bucket + 1) - start_of(bucket);
            self.mean[bucket + 1] = self.mean[bucket] + width * f64::midpoint(before, after);
        }
    }

    /// The length at which an answer of `num_output` tokens so far ends at the latest, or is assumed to.
    pub(crate) fn latest_end(num_output: u32, most: u32) -> u32 {
        most.min(MAX_PRIOR.max(num_output.saturating_mul(2)))
    }

    /// The share of answers that have more than `num_tokens` tokens, never zero.
    pub(crate) fn survival(&self, num_tokens: u32) -> f64 {
        Self::interpolate(&self.survival, num_tokens)
    }

    /// Expected tokens after the first `num_output` of an answer that has `most` at most.
    pub(crate) fn expected_left(&self, num_output: u32, most: u32) -> f64 {
        let end = Self::latest_end(num_output, most);
        let tokens = Self::interpolate(&self.mean, end) - Self::interpolate(&self.mean, num_output);
        tokens / self.survival(num_output)
    }

    fn interpolate(at: &[f64; NUM_BUCKETS + 1], num_tokens: u32) -> f64 {
        let bucket = bucket_of(num_tokens);
        let (start, end) = (start_of(bucket), start_of(bucket + 1));
        let share = ((f64::from(num_tokens) - start) / (end - start)).max(0.0);
        at[bucket] + (at[bucket + 1] - at[bucket]) * share
    }
}

fn bucket_of(num_tokens: u32) -> usize {
    let octave = num_tokens.max(1).ilog2();
    let is_upper = octave > 0 && num_tokens >> (octave - 1) & 1 == 1;
    2 * octave as usize + usize::from(is_upper)
}

/// Whether it is the first length of its half octave: only its two highest bits may be set.
fn begins_bucket(num_tokens: u32) -> bool {
    num_tokens & (u32::MAX >> 2 >> num_tokens.leading_zeros()) == 0
}

fn start_of(bucket: usize) -> f64 {
    let octave = (1_u64 << (bucket / 2)) as f64;
    octave * if bucket % 2 == 1 { 1.5 } else { 1.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn observe(lengths: &mut OutputLengths, num_tokens: u32, ends: bool) {
        (1..=num_tokens).for_each(|num| lengths.observe_token(num));
        if ends {
            lengths.observe_end(num_tokens);
        }
    }

    #[expect(clippy::cast_sign_loss, reason = "a number of tokens")]
    fn left(lengths: &OutputLengths, num_output: u32, most: u32) -> u32 {
        lengths.expected_left(num_output, most).round() as u32
    }

    #[test]
    fn answers_are_as_long_as_asked_until_some_have_ended() {
        let lengths = OutputLengths::new();
        assert_eq!(left(&lengths, 1, 1001), 1000);
        assert_eq!(left(&lengths, 300, 1000), 700);
        assert_eq!(left(&lengths, 48, 100_000), 2000);
        assert_eq!(left(&lengths, 4096, 100_000), 4096);
    }

    #[test]
    fn seen_lengths_replace_what_was_asked() {
        let mut lengths = OutputLengths::new();
        (0..500).for_each(|_| observe(&mut lengths, 200, true));
        let expected = left(&lengths, 1, 8000);
        assert!((190..250).contains(&expected), "{expected}");
        assert_eq!(left(&lengths, 1, 101), 100, "nearly all reach 100");
    }

    #[test]
    fn the_first_ends_tell_of_longer_answers() {
        let mut lengths = OutputLengths::new();
        let at_start = left(&lengths, 64, 4096);
        (0..100).for_each(|num| observe(&mut lengths, 64, num % 4 == 0));
        let expected = left(&lengths, 64, 4096);
        assert!(expected * 2 < at_start, "{expected} of {at_start}");
        (0..100).for_each(|_| observe(&mut lengths, 400, false));
        observe(&mut lengths, 64, true);
        assert!(left(&lengths, 64, 400) > 200, "they went on");
    }

    #[test]
    fn answers_that_were_cut_say_nothing_of_longer_ones() {
        let mut lengths = OutputLengths::new();
        (0..500).for_each(|_| observe(&mut lengths, 200, false));
        assert_eq!(left(&lengths, 1, 1001), 1000);
    }

    #[test]
    fn an_answer_that_outlives_the_others_is_expected_to_go_on() {
        let mut lengths = OutputLengths::new();
        (0..500).for_each(|_| observe(&mut lengths, 200, true));
        assert!(left(&lengths, 2000, 8000) > 1000);
        assert_eq!(left(&lengths, 4096, 4096), 0);
    }

    #[test]
    fn newer_answers_outweigh_older_ones() {
        let mut lengths = OutputLengths::new();
        (0..3000).for_each(|_| observe(&mut lengths, 1500, true));
        (0..3000).for_each(|_| observe(&mut lengths, 20, true));
        assert!(left(&lengths, 1, 2000) < 200);
    }
}
