//! How long the engine waits for its ranks and for other engines.

use std::time::Duration;

use plait_core::Micros;

use crate::group::GroupTimeouts;

/// A step that takes so many times what is expected hangs.
pub const EXPECTED_TIMES: u32 = 50;
/// No step of which nothing is known may take longer, however many tokens it has.
pub const LONGEST_STEP: Duration = Duration::from_secs(600);

/// For an engine to say which of its ranks has not loaded, before the group says only that it is missing.
const JOIN_GRACE: Duration = Duration::from_secs(10);

/// Limits on waiting.
#[derive(Clone, Copy, Debug)]
pub struct Timeouts {
    /// From the start to the last rank's answer to the warm-up step. [`crate::EngineSettings`] says it.
    pub load: Duration,
    /// From the last rank's Hello to the last answer to the warm-up step: ranks capture graphs. The settings say it too.
    pub capture: Duration,
    /// A step like those measured is overdue after [`EXPECTED_TIMES`] its expected time, but not before this.
    pub known_step: Duration,
    /// Any other step is overdue after this, plus [`Timeouts::step_token`] a token. It may compile a kernel.
    pub step: Duration,
    /// Added for each token of the step, padding included, up to [`LONGEST_STEP`] in all.
    pub step_token: Duration,
    /// Grace period from overdue to given up. In a group the step of another replica may be the slow one.
    pub stuck_grace: Duration,
    /// A rank without a message for this long is late.
    pub heartbeat: Duration,
    /// A rank on another host without a message for this long is lost: nobody there says that its process is stopped.
    pub remote_silence: Duration,
    /// The driver hangs when one pass of its loop takes this long.
    pub watchdog: Duration,
    /// For the ranks' Byes.
    pub bye: Duration,
    /// Grace period for the Fail of a rank whose process has ended: it may still be on its way.
    pub error_grace: Duration,
    /// Grace period for the cause of a rank's report that another one is gone. That one's own end tells more, and in a
    /// group it is another replica that hears of it first and waits for [`Timeouts::error_grace`].
    pub peer_lost_grace: Duration,
    /// For the other engines of a group.
    pub group: GroupTimeouts,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            load: Duration::from_secs(1800),
            capture: Duration::from_secs(1800),
            known_step: Duration::from_secs(10),
            step: Duration::from_secs(60),
            step_token: Duration::from_millis(100),
            stuck_grace: Duration::from_secs(60),
            heartbeat: Duration::from_millis(1500),
            remote_silence: Duration::from_secs(6),
            watchdog: Duration::from_secs(60),
            bye: Duration::from_secs(5),
            error_grace: Duration::from_millis(200),
            peer_lost_grace: Duration::from_secs(1),
            group: GroupTimeouts::default(),
        }
    }
}

impl Timeouts {
    /// The same with other limits on the start, for loading in the other engines of a group too.
    pub fn with_start(self, load: Duration, capture: Duration) -> Self {
        let group = GroupTimeouts {
            join: load + JOIN_GRACE,
            ..self.group
        };
        Self {
            load,
            capture,
            group,
            ..self
        }
    }

    /// When a step of `num_tokens`, padding included, is overdue. `expected` is its time if it is known.
    pub fn of_step(&self, num_tokens: u32, expected: Option<Micros>) -> Duration {
        match expected {
            Some(Micros(micros)) => {
                let expected = Duration::from_micros(micros.saturating_mul(EXPECTED_TIMES.into()));
                self.known_step.max(expected)
            }
            None => (self.step + self.step_token * num_tokens).min(LONGEST_STEP.max(self.step)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_has_longer_to_join_than_a_rank_to_load() {
        let timeouts = Timeouts::default();
        let timeouts = timeouts.with_start(Duration::from_secs(3600), timeouts.capture);
        assert_eq!(timeouts.load.as_secs(), 3600);
        assert_eq!(timeouts.group.join.as_secs(), 3610);
    }

    #[test]
    fn a_known_step_is_overdue_after_fifty_times_its_time_and_any_other_within_ten_minutes() {
        let timeouts = Timeouts::default();
        let seconds = |num_tokens, millis: Option<u64>| {
            let expected = millis.map(|millis| Micros(millis * 1000));
            timeouts.of_step(num_tokens, expected).as_secs()
        };
        assert_eq!(seconds(2048, Some(20)), 10);
        assert_eq!(seconds(2048, Some(800)), 40);
        assert_eq!(seconds(256, None), 85);
        assert_eq!(seconds(65_536, None), 600);
    }
}
