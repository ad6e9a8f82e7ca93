//! How long a request may take, and which part of it took too long.

use std::time::Duration;

use plait_core::Micros;
use plait_openai::ApiError;
use serde::Deserialize;

use crate::clock::{micros, since};
use crate::live_request::LiveRequest;

/// From one look at all requests to the next.
const INTERVAL: Duration = Duration::from_millis(50);

/// The JSON of `plait.deadline_settings.DeadlineSettings`, in seconds; None: no limit.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeadlineSettings {
    /// From arrival to the end.
    pub request_timeout_seconds: Option<f64>,
    /// From arrival to the first token.
    pub first_token_timeout_seconds: Option<f64>,
    /// Between two tokens.
    pub idle_timeout_seconds: Option<f64>,
}

/// The deadlines of a replica's requests, and when they are looked at.
#[derive(Debug)]
pub struct Deadlines {
    limits: DeadlineSettings,
    next_look: Micros,
}

impl Deadlines {
    /// With these limits.
    pub fn new(limits: DeadlineSettings) -> Self {
        Self {
            limits,
            next_look: Micros(0),
        }
    }

    /// When requests are looked at next; None if nothing bounds them.
    pub fn next_look(&self) -> Option<Micros> {
        let DeadlineSettings {
            request_timeout_seconds,
            first_token_timeout_seconds,
            idle_timeout_seconds,
        } = self.limits;
        let limits = [
            request_timeout_seconds,
            first_token_timeout_seconds,
            idle_timeout_seconds,
        ];
        limits.iter().any(Option::is_some).then_some(self.next_look)
    }

    /// Whether it is time to look; the next time is then set.
    pub fn is_due(&mut self, now: Micros) -> bool {
        let is_due = self.next_look().is_some_and(|time| time <= now);
        if is_due {
            self.next_look = Micros(now.0 + micros(INTERVAL));
        }
        is_due
    }

    /// What the client of a request that is late reads.
    pub fn passed_by(&self, live: &LiveRequest, now: Micros) -> Option<ApiError> {
        self.passed(
            &Times {
                received: live.received,
                last_token: live.last_token,
                has_output: live.has_output,
            },
            now,
        )
    }

    fn passed(&self, times: &Times, now: Micros) -> Option<ApiError> {
        let total = Awaited {
            limit: self.limits.request_timeout_seconds,
            from: times.received,
            flag: "request",
            what: "its end",
        };
        let awaited = [self.next_token(times), Some(total)];
        let mut late = awaited.into_iter().flatten();
        late.find_map(|awaited| awaited.problem(now))
    }

    /// None where no token is due.
    fn next_token(&self, times: &Times) -> Option<Awaited> {
        let awaited = match times.last_token {
            None => Awaited {
                limit: self.limits.first_token_timeout_seconds,
                from: times.received,
                flag: "first-token",
                what: "its first token",
            },
            Some(last) => Awaited {
                limit: self.limits.idle_timeout_seconds,
                from: last,
                flag: "idle",
                what: "the token after the last one",
            },
        };
        times.has_output.then_some(awaited)
    }
}

/// When things happened to a request.
struct Times {
    received: Micros,
    last_token: Option<Micros>,
    has_output: bool,
}

/// What is to come within a limit.
struct Awaited {
    limit: Option<f64>,
    from: Micros,
    flag: &'static str,
    what: &'static str,
}

impl Awaited {
    fn problem(self, now: Micros) -> Option<ApiError> {
        let Self { flag, what, .. } = self;
        let limit = self.limit?;
        let is_late = since(self.from, now).as_secs_f64() >= limit;
        is_late.then(|| {
            ApiError::deadline(format!(
                "the request was ended: {what} had not come within {limit} s, the server's \
                 --{flag}-timeout-seconds; ask for less, or try again when the server is less busy"
            ))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000;

    fn deadlines(request: f64, first_token: f64, idle: f64) -> Deadlines {
        let limit = |seconds: f64| (seconds > 0.0).then_some(seconds);
        Deadlines::new(DeadlineSettings {
            request_timeout_seconds: limit(request),
            first_token_timeout_seconds: limit(first_token),
            idle_timeout_seconds: limit(idle),
        })
    }

    /// The flag whose limit is passed at `now`, in seconds, by a request that came at 1 s.
    fn passed(deadlines: &Deadlines, last_token: Option<u64>, now: u64) -> Option<String> {
        let times = Times {
            received: Micros(SECOND),
            last_token: last_token.map(|seconds| Micros(seconds * SECOND)),
            has_output: true,
        };
        let error = deadlines.passed(&times, Micros(now * SECOND))?;
        assert_eq!((error.status, error.code), (504, Some("deadline_exceeded")));
        let flag = error.message.split("--").nth(1)?;
        Some(flag.split("-timeout").next()?.to_owned())
    }

    #[test]
    fn the_first_token_counts_from_the_arrival_and_the_next_from_the_last_one() {
        let deadlines = deadlines(0.0, 5.0, 2.0);
        assert_eq!(passed(&deadlines, None, 5), None);
        assert_eq!(passed(&deadlines, None, 6).as_deref(), Some("first-token"));
        assert_eq!(passed(&deadlines, Some(6), 7), None);
        assert_eq!(passed(&deadlines, Some(6), 8).as_deref(), Some("idle"));
        assert_eq!(passed(&deadlines, Some(60), 61), None, "no limit in total");
    }

    #[test]
    fn the_end_counts_from_the_arrival_whatever_has_come() {
        let deadlines = deadlines(10.0, 0.0, 0.0);
        assert_eq!(passed(&deadlines, None, 10), None);
        assert_eq!(passed(&deadlines, None, 11).as_deref(), Some("request"));
        assert_eq!(passed(&deadlines, Some(11), 11).as_deref(), Some("request"));
    }

    #[test]
    fn a_request_without_output_has_only_its_end_to_wait_for() {
        let times = Times {
            received: Micros(0),
            last_token: None,
            has_output: false,
        };
        let of_tokens = deadlines(0.0, 1.0, 1.0);
        assert_eq!(of_tokens.passed(&times, Micros(9 * SECOND)), None);
        let of_end = deadlines(1.0, 0.0, 0.0);
        assert!(of_end.passed(&times, Micros(9 * SECOND)).is_some());
    }

    #[test]
    fn requests_are_looked_at_every_interval_and_never_without_a_limit() {
        let mut bounded = deadlines(1.0, 0.0, 0.0);
        assert!(bounded.is_due(Micros(SECOND)));
        let next = bounded.next_look().unwrap();
        assert_eq!(next, Micros(SECOND + micros(INTERVAL)));
        assert!(!bounded.is_due(Micros(next.0 - 1)) && bounded.is_due(next));
        let mut unbounded = deadlines(0.0, 0.0, 0.0);
        assert_eq!(unbounded.next_look(), None);
        assert!(!unbounded.is_due(Micros(SECOND)));
    }
}
