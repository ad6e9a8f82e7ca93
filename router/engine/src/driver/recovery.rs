//! A replica whose ranks were lost: its requests wait for new ranks, and go on with them.

use plait_core::{Availability, Micros};
use plait_proto::{ExitCode, Hello};

use super::{EventLoop, Stage};
use crate::handshake::Handshake;
use crate::replica_pools::{AskedPools, ReplicaPools};
use crate::serving::Serving;
use crate::shared::NextRanks;
use crate::store::KeyStore;

impl EventLoop {
    /// The replica's requests, once it has served.
    pub(super) fn serving(&self) -> Option<&Serving> {
        match &self.stage {
            Stage::Serving(serving)
            | Stage::WarmingUp { serving, .. }
            | Stage::Down { kept: serving, .. } => Some(serving),
            Stage::Handshaking { kept, .. } => kept.as_deref(),
            Stage::ShuttingDown { .. } | Stage::Ended => None,
        }
    }

    pub(super) fn serving_mut(&mut self) -> Option<&mut Serving> {
        match &mut self.stage {
            Stage::Serving(serving)
            | Stage::WarmingUp { serving, .. }
            | Stage::Down { kept: serving, .. } => Some(serving),
            Stage::Handshaking { kept, .. } => kept.as_deref_mut(),
            Stage::ShuttingDown { .. } | Stage::Ended => None,
        }
    }

    /// Whether the replica has served and has no ranks, or they are not ready.
    pub(super) fn is_recovering(&self) -> bool {
        self.own().status.is_down()
    }

    /// Whether the replica can wait for new ranks after this failure.
    pub(super) fn can_recover(&self, code: ExitCode) -> bool {
        let is_replaced =
            self.driver.replica.settings.restarts_ranks && self.driver.group.is_none();
        match &self.stage {
            Stage::Serving(_) => {
                is_replaced
                    && matches!(
                        code,
                        ExitCode::RankLost | ExitCode::Bug | ExitCode::Hardware
                    )
            }
            // What hardware, settings and files refuse at a start stays refused.
            Stage::Handshaking { kept: Some(_), .. } | Stage::WarmingUp { .. } => {
                self.is_recovering() && matches!(code, ExitCode::RankLost | ExitCode::Bug)
            }
            _ => false,
        }
    }

    /// The ranks are lost. Their requests wait until the launcher has started others, or gives up.
    pub(super) fn go_down(&mut self, code: ExitCode, reason: &str) {
        self.send_failure_to_ranks(code, reason);
        let mut kept = match std::mem::replace(&mut self.stage, Stage::Ended) {
            Stage::Serving(serving)
            | Stage::WarmingUp { serving, .. }
            | Stage::Handshaking {
                kept: Some(serving),
                ..
            } => serving,
            stage => {
                self.stage = stage;
                return;
            }
        };
        kept.lose_ranks();
        let reason = reason.to_owned();
        let own = self.own();
        own.status.lose(code, &reason);
        own.metrics.losses.num_losses.inc();
        own.metrics.losses.is_down.set(1);
        self.set_availability(Availability::Avoided);
        self.stage = Stage::Down { kept, code, reason };
    }

    /// The launcher starts new ranks, which dial the link that it has left.
    pub(super) fn restart(&mut self) {
        let Some(NextRanks { link, config }) = self.own().take_next_ranks() else {
            return;
        };
        match std::mem::replace(&mut self.stage, Stage::Ended) {
            Stage::Down { kept, .. } => {
                let now = self.now();
                // What the old ranks reported of each other.
                self.lost = None;
                self.driver.link = link;
                self.config = Some(config);
                self.driver.replica.started = now;
                self.store = KeyStore::default();
                self.last_heard.fill(now);
                let asked = AskedPools::new(&self.driver.replica.settings.pages);
                self.stage = Stage::Handshaking {
                    handshake: Handshake::new(self.ranks, asked),
                    kept: Some(kept),
                };
            }
            stage => self.stage = stage,
        }
    }

    /// The launcher starts no ranks any more. A replica whose new ranks are all there goes on with them.
    pub(super) fn note_given_up(&mut self, why: String) {
        if matches!(
            self.stage,
            Stage::Down { .. } | Stage::Handshaking { kept: Some(_), .. }
        ) {
            self.given_up = Some(why);
        }
    }

    /// Ends a replica that gets no ranks. Streams of which a thread fills a mask go first where another
    /// replica serves: they can leave when it is there.
    pub(super) fn end_if_given_up(&mut self) {
        let Some(why) = self.given_up.take() else {
            return;
        };
        let has_other = self.shared().routes.has_other(self.own().number, 0);
        if has_other && self.serving().is_some_and(Serving::awaits_mask_to_move) {
            self.given_up = Some(why);
        } else {
            self.give_up(&why);
        }
    }

    /// The launcher starts no ranks any more, or not all of those that the replica awaits.
    fn give_up(&mut self, why: &str) {
        let (code, reason) = match &self.stage {
            Stage::Down { code, reason, .. } => (*code, format!("{reason}; {why}")),
            Stage::Handshaking { kept: Some(_), .. } => (ExitCode::RankLost, why.to_owned()),
            _ => return,
        };
        self.end_replica(code, &reason);
    }

    /// All new ranks are there. They must hold what the lost ones held.
    pub(super) fn take_back(&mut self, hellos: &[Hello]) {
        let Stage::Handshaking { kept, .. } = &mut self.stage else {
            return;
        };
        let Some(serving) = kept.take() else {
            return;
        };
        let before = &serving.settings().runtime;
        let pools = ReplicaPools::of(hellos);
        if let Some(problem) = pools.missing(before) {
            *kept = Some(serving);
            return self.fail(ExitCode::Hardware, &problem);
        }
        let pools = pools.like(before);
        self.welcome(serving, pools);
    }

    /// New ranks have answered their first step.
    pub(super) fn come_back(&self, now: Micros) {
        let own = self.own();
        let seconds = now.0.saturating_sub(self.driver.replica.started.0) as f64 / 1e6;
        own.status.recover(seconds);
        own.metrics.losses.is_down.set(0);
        self.set_availability(Availability::Open);
    }
}
