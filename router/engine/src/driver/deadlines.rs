//! Deadlines, and what happens when one passes.

use std::time::Duration;

use plait_core::{Availability, Micros};
use plait_proto::ExitCode;

use super::{EventLoop, Grouped, Stage};
use crate::clock::{micros, since};
use crate::serving::Serving;
use crate::status::Phase;
use crate::timeouts::Timeouts;

/// Ranks that a message names at most.
const MAX_NAMED: usize = 8;

impl EventLoop {
    pub(super) fn next_deadline(&self) -> Option<Micros> {
        let stage = match &self.stage {
            Stage::Handshaking { .. } | Stage::WarmingUp { .. } => Some(self.start_deadline()),
            Stage::ShuttingDown { deadline, .. } => Some(*deadline),
            Stage::Serving(serving) => self
                .next_health_change(serving)
                .into_iter()
                .chain(self.next_plan_due(serving))
                .min(),
            Stage::Down { .. } | Stage::Ended => None,
        };
        let lost = self.lost.as_ref().map(|lost| lost.deadline);
        let group = self.driver.group.as_ref().and_then(Grouped::next_deadline);
        // Those that wait for ranks have deadlines too.
        let late = self.serving().and_then(Serving::next_look_for_late);
        let all = stage.into_iter().chain(lost).chain(group).chain(late);
        all.min()
    }

    /// When a step becomes overdue or is given up, or a heartbeat becomes late; only times to come.
    fn next_health_change(&self, serving: &Serving) -> Option<Micros> {
        let stuck = serving.oldest_deadline();
        let given_up = stuck.map(|deadline| self.abandon_deadline(deadline));
        let late = self.heartbeat_deadline();
        let silent = self.quietest_remote_rank().map(|(_, deadline)| deadline);
        stuck
            .into_iter()
            .chain(given_up)
            .chain(late)
            .chain(silent)
            .filter(|deadline| *deadline > self.checked_at)
            .min()
    }

    /// When the next step is to be planned. A replica of a group waits for votes instead.
    fn next_plan_due(&self, serving: &Serving) -> Option<Micros> {
        let is_planned = self.driver.group.is_none() && !self.own().status.is_paused();
        serving
            .next_plan_due()
            .filter(|time| is_planned && *time > self.checked_at)
    }

    /// When a step that was due at `deadline` is given up.
    fn abandon_deadline(&self, deadline: Micros) -> Micros {
        // A pause of this process was one of its ranks too, so their grace period starts again.
        let overdue = deadline.max(self.resumed_at).0;
        Micros(overdue.saturating_add(micros(self.timeouts.stuck_grace)))
    }

    /// When the phase of the start must be over. A pause of this process was one of its ranks too.
    fn start_deadline(&self) -> Micros {
        let after = |time: Micros, limit| Micros(time.max(self.resumed_at).0 + micros(limit));
        let load = after(self.driver.replica.started, self.timeouts.load);
        match &self.stage {
            Stage::WarmingUp { since, .. } => load.min(after(*since, self.timeouts.capture)),
            _ => load,
        }
    }

    /// What the ranks that hold up the start have not done.
    fn start_problem(&self) -> Option<String> {
        let Timeouts { load, capture, .. } = self.timeouts;
        let (ranks, done, limit, from, flag) = match &self.stage {
            Stage::Handshaking { handshake, .. } => {
                let ranks = handshake.missing();
                (ranks, "loaded the model", load, "the start", "load")
            }
            Stage::WarmingUp { warm_up, since, .. } => {
                let ranks = warm_up.missing();
                let is_own = since.0 + micros(capture) <= self.checked_at.0;
                let (limit, from, flag) = if is_own {
                    (capture, "all had loaded", "capture")
                } else {
                    (load, "the start", "load")
                };
                (ranks, "answered the warm-up step", limit, from, flag)
            }
            _ => return None,
        };
        Some(format!(
            "{} not {done} {} s after {from}: its process hangs, or its disk or device is slow; see the rank's last log \
             lines, or raise --{flag}-timeout-seconds",
            who_has(&ranks),
            limit.as_secs_f64()
        ))
    }

    /// The driver hangs if it does not call this again within `wait` and the watchdog's timeout.
    pub(super) fn set_watchdog_deadline(&self, wait: Option<Duration>) {
        let latest = wait.map(|wait| self.after(wait + self.timeouts.watchdog));
        self.own().status.set_watchdog_deadline(latest);
    }

    /// Call it after a wait that should have ended at `deadline`.
    pub(super) fn detect_pause(&mut self, deadline: Option<Micros>) {
        let now = self.now();
        if deadline.is_some_and(|deadline| since(deadline, now) > self.timeouts.heartbeat) {
            self.resumed_at = now;
        }
    }

    fn abandon_reason(&self) -> &'static str {
        if self.driver.group.is_some() {
            "a step has had no result in time: its ranks hang, or those of another engine that they wait for"
        } else {
            "a step has had no result in time: its device hangs, or the rank does; if that comes again, serve with \
             --no-cuda-graphs or another --attention-backend"
        }
    }

    fn heartbeat_deadline(&self) -> Option<Micros> {
        let earliest = self.last_heard.iter().min()?;
        Some(Micros(earliest.0 + micros(self.timeouts.heartbeat)))
    }

    /// The rank on another host that was heard of least recently, and when it counts as lost. A pause of this process
    /// may have been one of its host too.
    fn quietest_remote_rank(&self) -> Option<(u32, Micros)> {
        let heard = self.ranks.iter().zip(&self.last_heard);
        let remote = heard.filter(|(rank, _)| self.driver.link.is_remote(*rank));
        let (rank, heard) = remote.min_by_key(|(_, heard)| **heard)?;
        let from = (*heard).max(self.resumed_at).0;
        Some((rank, Micros(from + micros(self.timeouts.remote_silence))))
    }

    pub(super) fn check_deadlines(&mut self) {
        let now = self.checked_at;
        if let Some(serving) = self.serving_mut() {
            serving.end_late(now);
        }
        if let Some(lost) = self.lost.take_if(|lost| lost.deadline <= now) {
            self.fail(ExitCode::RankLost, &lost.reason);
        }
        match &self.stage {
            Stage::Handshaking { .. } | Stage::WarmingUp { .. } if self.start_deadline() <= now => {
                if let Some(problem) = self.start_problem() {
                    self.fail(ExitCode::RankLost, &problem);
                }
            }
            Stage::ShuttingDown { has_left, deadline }
                if *deadline <= now || has_left.iter().all(|left| *left) =>
            {
                self.own().status.enter(Phase::Stopped);
                self.stage = Stage::Ended;
            }
            Stage::Serving(serving)
                if serving
                    .oldest_deadline()
                    .is_some_and(|deadline| self.abandon_deadline(deadline) <= now) =>
            {
                self.fail(ExitCode::RankLost, self.abandon_reason());
            }
            Stage::Serving(serving) => {
                self.report_health(serving, now);
                self.lose_silent_rank(now);
            }
            _ => {}
        }
    }

    fn lose_silent_rank(&mut self, now: Micros) {
        if let Some((rank, _)) = self
            .quietest_remote_rank()
            .filter(|(_, deadline)| *deadline <= now)
        {
            let seconds = self.timeouts.remote_silence.as_secs_f64();
            let reason =
                format!("no heartbeat for {seconds} s: its process is stopped, or its host");
            self.lose_rank(rank, &reason);
        }
    }

    fn report_health(&self, serving: &Serving, now: Micros) {
        let stuck = is_overdue(serving, now);
        let late = self
            .heartbeat_deadline()
            .is_some_and(|deadline| deadline <= now);
        let own = self.own();
        let (stuck_changed, late_changed) =
            (own.status.set_stuck(stuck), own.status.set_late(late));
        if stuck_changed {
            let now = if stuck {
                "a step is overdue"
            } else {
                "the overdue step was answered"
            };
            tracing::warn!(replica = own.number, "{now}");
        }
        if late_changed {
            let now = if late {
                "a rank's heartbeat is late"
            } else {
                "the late rank sends heartbeats again"
            };
            tracing::warn!(replica = own.number, "{now}");
        }
        if stuck_changed || late_changed {
            let availability = if stuck || late {
                Availability::Avoided
            } else {
                Availability::Open
            };
            self.set_availability(availability);
        }
    }
}

/// `rank 3 has`, or `ranks 3, 4 and 2 more have`.
fn who_has(ranks: &[u32]) -> String {
    let names: Vec<String> = ranks.iter().take(MAX_NAMED).map(u32::to_string).collect();
    let names = names.join(", ");
    match ranks.len() {
        1 => format!("rank {names} has"),
        num if num > MAX_NAMED => format!("ranks {names} and {} more have", num - MAX_NAMED),
        _ => format!("ranks {names} have"),
    }
}

fn is_overdue(serving: &Serving, now: Micros) -> bool {
    serving
        .oldest_deadline()
        .is_some_and(|deadline| deadline <= now)
}
