//! The driver thread. It owns the scheduler and the link, and waits for nothing else.

mod deadlines;
mod grouped;
mod moves;
mod ranks;
mod recovery;
mod store;

pub use grouped::Grouped;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, TrySendError};
use plait_core::{Availability, Micros};
use plait_openai::ApiError;
use plait_proto::{Drain, ExitCode, Fail, Fingerprint, Message};

use crate::clock::{micros, since};
use crate::handshake::{Handshake, WarmUp};
use crate::intake::Admission;
use crate::kv_events::KvEventSender;
use crate::link::Link;
use crate::mailbox::Mail;
use crate::masks::MaskJobs;
use crate::metrics::Rejection;
use crate::output::StreamEvent;
use crate::rank_range::RankRange;
use crate::replica_pools::AskedPools;
use crate::serving::Serving;
use crate::settings::EngineSettings;
use crate::shared::{ReplicaShared, Shared};
use crate::status::Phase;
use crate::step_trace::StepRecorder;
use crate::store::KeyStore;
use crate::timeouts::Timeouts;

/// Everything that the driver's thread owns.
pub struct Driver {
    /// The ranks' end.
    pub link: Link,
    /// From the text threads.
    pub admissions: Receiver<Admission>,
    /// To the output thread.
    pub batches: Sender<Vec<StreamEvent>>,
    /// What all replicas share.
    pub shared: Arc<Shared>,
    /// What this one shares with others.
    pub own: Arc<ReplicaShared>,
    /// Writes the step trace, if there is one.
    pub recorder: Option<StepRecorder>,
    /// Takes KV events, if they are published.
    pub kv_events: Option<KvEventSender>,
    /// The group that this replica steps with, if any.
    pub group: Option<Grouped>,
    /// To the mask threads.
    pub masks: MaskJobs,
    pub replica: ReplicaConfig,
}

/// What is known of a replica before its ranks say Hello.
#[derive(Clone)]
pub struct ReplicaConfig {
    /// From the command line.
    pub settings: EngineSettings,
    /// Longest prompt plus output.
    pub max_model_len: u32,
    /// Tokens of the vocabulary.
    pub vocab_size: u32,
    /// Limits on waiting.
    pub timeouts: Timeouts,
    /// When the engine was started; its ranks load from then on.
    pub started: Micros,
}

impl ReplicaConfig {
    /// The ranks of one of the engine's replicas.
    pub fn ranks_of(&self, replica: u32) -> RankRange {
        let settings = &self.settings;
        RankRange::of_replica(replica, settings.num_ranks, settings.num_replicas)
    }
}

impl Driver {
    /// Runs the event loop until the engine is closed.
    pub fn run(self) {
        let ReplicaConfig {
            settings, timeouts, ..
        } = &self.replica;
        let ranks = self.replica.ranks_of(self.own.number);
        let event_loop = EventLoop {
            last_heard: vec![Micros(0); ranks.len()],
            config: None,
            lost: None,
            checked_at: Micros(0),
            resumed_at: Micros(0),
            is_draining: false,
            is_closed: false,
            given_up: None,
            unsent: Vec::new(),
            stage: Stage::Handshaking {
                handshake: Handshake::new(ranks, AskedPools::new(&settings.pages)),
                kept: None,
            },
            store: KeyStore::default(),
            ranks,
            timeouts: *timeouts,
            driver: self,
        };
        event_loop.run();
    }
}

/// The replica's life, in order.
enum Stage {
    /// Ranks load and say Hello.
    Handshaking {
        handshake: Handshake,
        /// The requests of ranks that were lost.
        kept: Option<Box<Serving>>,
    },
    /// All got a Welcome and run step 0.
    WarmingUp {
        /// When all had loaded.
        since: Micros,
        warm_up: WarmUp,
        serving: Box<Serving>,
    },
    /// Requests are served.
    Serving(Box<Serving>),
    /// The ranks were lost. The launcher starts others, or gives up.
    Down {
        kept: Box<Serving>,
        code: ExitCode,
        reason: String,
    },
    /// The ranks got a Drain.
    ShuttingDown {
        has_left: Vec<bool>,
        deadline: Micros,
    },
    /// Drained, failed or closed.
    Ended,
}

/// A rank that is gone, while a Fail that explains it may still arrive.
struct LostRank {
    /// The rank that is gone, or that reports another one gone.
    rank: u32,
    reports_peer_lost: bool,
    reason: String,
    deadline: Micros,
}

/// The driver's state.
struct EventLoop {
    driver: Driver,
    stage: Stage,
    ranks: RankRange,
    timeouts: Timeouts,
    /// Of the replica's ranks.
    store: KeyStore,
    /// The configuration's fingerprint of ranks that were started again.
    config: Option<Fingerprint>,
    /// When each rank sent its last message.
    last_heard: Vec<Micros>,
    lost: Option<LostRank>,
    /// The time that this pass compares deadlines with.
    checked_at: Micros,
    /// When the loop last woke far too late: the machine was paused, or this process stopped.
    resumed_at: Micros,
    is_draining: bool,
    is_closed: bool,
    /// Why no new ranks start.
    given_up: Option<String>,
    /// Events that the output thread has no room for. No step is planned until they are gone.
    unsent: Vec<StreamEvent>,
}

impl EventLoop {
    fn run(mut self) {
        while !self.is_closed {
            let deadline = self.next_deadline();
            let timeout = deadline.map(|deadline| since(self.now(), deadline));
            self.set_watchdog_deadline(timeout);
            let group = self.driver.group.as_ref();
            let others = group.map_or_else(Vec::new, Grouped::poll_items);
            let timeout = self.shared().clock.limit_on_blocking(timeout);
            self.driver
                .link
                .wait(self.own().mailbox.wakeup(), others, timeout);
            self.set_watchdog_deadline(Some(Duration::ZERO));
            self.detect_pause(deadline);
            self.receive_from_ranks();
            self.receive_from_group();
            self.take_admissions();
            self.take_mail();
            self.take_moved();
            self.checked_at = self.now();
            self.take_masks();
            self.send_steps();
            self.send_masks();
            self.check_deadlines();
            self.move_streams_if_down();
            self.end_if_given_up();
            self.shut_down_if_drained();
            self.flush();
        }
        self.take_moved();
        self.end_streams(&ApiError::unavailable("the server was stopped"));
        self.flush_all();
        self.leave_group("it was stopped");
        self.shut_ranks_down();
        self.set_watchdog_deadline(None);
    }

    fn shared(&self) -> &Shared {
        &self.driver.shared
    }

    fn own(&self) -> &ReplicaShared {
        &self.driver.own
    }

    fn now(&self) -> Micros {
        self.shared().clock.now()
    }

    fn after(&self, duration: Duration) -> Micros {
        Micros(self.now().0 + micros(duration))
    }

    fn take_admissions(&mut self) {
        while !self.awaits_decision()
            && let Ok(admission) = self.driver.admissions.try_recv()
        {
            if self.shared().leave_pending(admission.stream) {
                self.admit(admission);
            } else {
                self.shared().routes.finish(admission.stream);
            }
        }
    }

    fn admit(&mut self, admission: Admission) {
        let now = self.now();
        if let Some(serving) = self.serving_mut() {
            serving.admit(admission, now);
        } else {
            let error = self.refusal();
            self.own().metrics.requests.reject(Rejection::NotReady);
            self.shared().routes.finish(admission.stream);
            self.shared()
                .output_queue
                .put_error(admission.stream, &error);
        }
    }

    fn refusal(&self) -> ApiError {
        let in_group = self.driver.group.is_some();
        self.shared().status.refusal_of(self.own().number, in_group)
    }

    fn take_mail(&mut self) {
        for mail in self.own().mailbox.take() {
            match (mail, self.serving_mut()) {
                (Mail::Close, _) => self.is_closed = true,
                (Mail::Drain, _) => self.drain(),
                (
                    Mail::RankEnded {
                        rank,
                        reason,
                        is_silenced,
                    },
                    _,
                ) => self.rank_ended(rank, &reason, is_silenced),
                (Mail::Restart, _) => self.restart(),
                (Mail::GiveUp(why), _) => self.note_given_up(why),
                (Mail::Abort(stream), _) => self.abort(stream),
                (Mail::StopString(request), Some(serving)) => serving.stop(request),
                (Mail::EndStream { stream, error }, _) => self.end_stream(stream, *error),
                (Mail::FlushCache, Some(serving)) => serving.flush_cache(),
                (Mail::Pause(is_paused), _) => self.pause(is_paused),
                (Mail::ListRequests, serving) => {
                    let listed = serving.map_or_else(Vec::new, |serving| serving.list_requests());
                    self.own().listing.answer(listed);
                }
                (Mail::StopString(_) | Mail::FlushCache, None) => {}
            }
        }
    }

    /// A drain is never paused: what waits for a step would wait for ever.
    fn pause(&self, is_paused: bool) {
        let is_paused = is_paused && !self.is_draining;
        self.own().status.set_paused(is_paused);
    }

    fn drain(&mut self) {
        self.is_draining = true;
        self.pause(false);
        match self.stage {
            Stage::Serving(_) if self.is_formed() => self.own().status.enter(Phase::Draining),
            _ if self.is_recovering() => self.own().status.enter(Phase::Draining),
            Stage::Down { .. } => {}
            Stage::Handshaking { .. } | Stage::WarmingUp { .. } | Stage::Serving(_) => {
                self.leave_group("it was stopped before all engines had joined");
                self.start_shutdown();
            }
            Stage::ShuttingDown { .. } | Stage::Ended => {}
        }
    }

    fn rank_ended(&mut self, rank: u32, reason: &str, is_silenced: bool) {
        let grace = if is_silenced {
            Duration::ZERO
        } else {
            self.timeouts.error_grace
        };
        let is_explained = self.is_explained(rank);
        match &mut self.stage {
            Stage::ShuttingDown { has_left, .. } => {
                if let Some(place) = self.ranks.place(rank) {
                    has_left[place] = true;
                }
            }
            // The launcher ends what is left of them.
            Stage::Down { .. } | Stage::Ended => {}
            _ if is_explained => {}
            _ => {
                self.lost = Some(LostRank {
                    rank,
                    reports_peer_lost: false,
                    reason: format!("rank {rank} was lost: {reason}"),
                    deadline: self.after(grace),
                });
            }
        }
    }

    /// Whether a known loss explains that this rank ended.
    fn is_explained(&self, rank: u32) -> bool {
        let known = self.lost.as_ref();
        known.is_some_and(|lost| !lost.reports_peer_lost || lost.rank == rank)
    }

    /// Another rank's end tells more about the loss than this report of it.
    fn rank_reports_peer_lost(&mut self, by: u32, reason: &str) {
        if self.lost.as_ref().is_none_or(|lost| lost.rank == by) {
            self.lost = Some(LostRank {
                rank: by,
                reports_peer_lost: true,
                reason: format!("rank {by}: {reason}"),
                deadline: self.after(self.timeouts.peer_lost_grace),
            });
        }
    }

    fn send_steps(&mut self) {
        if self.driver.group.is_some() {
            return self.vote();
        }
        let now = self.checked_at;
        if self.output_waits() || self.own().status.is_paused() {
            return;
        }
        let Stage::Serving(serving) = &mut self.stage else {
            return;
        };
        while let Some(frames) = serving.next_step(now) {
            if let Err((rank, error)) = self.driver.link.send_all(frames) {
                return self.lose_rank(rank, &format!("it cannot be reached: {error}"));
            }
        }
    }

    /// Takes the masks that have come: what follows from them concerns the next plan.
    fn take_masks(&mut self) {
        if let Some(serving) = self.serving_mut() {
            serving.take_masks();
        }
    }

    /// Sends the masks of the oldest step in flight, which may be the one just sent, if they are there.
    fn send_masks(&mut self) {
        let Stage::Serving(serving) = &mut self.stage else {
            return;
        };
        for masks in serving.masks_to_send() {
            self.send_to_all(&masks.into());
        }
    }

    fn send_to_all(&mut self, message: &Message) {
        if let Err((rank, error)) = self.driver.link.send_all(&plait_proto::encode(message)) {
            self.lose_rank(rank, &format!("it cannot be reached: {error}"));
        }
    }

    /// Passes the replica's events on. Never blocks: other replicas of a group wait for this one's votes.
    fn flush(&mut self) {
        if let Some(serving) = self.serving_mut() {
            let mut events = serving.take_events();
            serving.publish();
            serving.send_kv_events();
            self.unsent.append(&mut events);
        }
        if self.output_waits() && !self.offer_unsent() {
            self.own().output_is_full.store(true, Ordering::SeqCst);
            // The output thread may have made room before it could see the flag.
            self.offer_unsent();
        }
    }

    /// Events wait for the output thread.
    fn output_waits(&self) -> bool {
        !self.unsent.is_empty()
    }

    /// False if there was no room. Nobody reads if the output thread has panicked, which its sentinel reports.
    fn offer_unsent(&mut self) -> bool {
        let events = std::mem::take(&mut self.unsent);
        if let Err(TrySendError::Full(events)) = self.driver.batches.try_send(events) {
            self.unsent = events;
        }
        !self.output_waits()
    }

    /// The last events. The closed output queue makes room for them.
    fn flush_all(&mut self) {
        self.flush();
        if self.output_waits() {
            let _delivered = self.driver.batches.send(std::mem::take(&mut self.unsent));
        }
    }

    fn shut_down_if_drained(&mut self) {
        let Some(serving) = self.serving() else {
            return;
        };
        let is_drained = serving.is_idle() && self.has_taken_all();
        if self.is_draining && is_drained && self.driver.group.is_none() {
            self.flush();
            self.start_shutdown();
        }
    }

    /// No request is on its way to the scheduler.
    fn has_taken_all(&self) -> bool {
        self.shared().pending_streams.is_empty() && self.driver.admissions.is_empty()
    }

    fn leave_group(&mut self, reason: &str) {
        if let Some(group) = &mut self.driver.group {
            group.give_up(ExitCode::RankLost, reason);
        }
    }

    fn start_shutdown(&mut self) {
        self.set_availability(Availability::Closed);
        let drain = plait_proto::encode(&Drain {}.into());
        // A rank that cannot be reached is gone; one without a Hello has nothing to finish.
        let is_told = |rank| self.has_joined(rank) && self.driver.link.send(rank, &drain).is_ok();
        let has_left = self.ranks.iter().map(|rank| !is_told(rank)).collect();
        self.stage = Stage::ShuttingDown {
            has_left,
            deadline: self.after(self.timeouts.bye),
        };
    }

    /// Sends Drain to the ranks unless they have it.
    fn shut_ranks_down(&mut self) {
        if !matches!(self.stage, Stage::ShuttingDown { .. } | Stage::Ended) {
            self.start_shutdown();
        }
    }

    fn has_joined(&self, rank: u32) -> bool {
        match &self.stage {
            Stage::Handshaking { handshake, .. } => handshake.has(rank),
            Stage::Down { .. } => false,
            _ => true,
        }
    }

    fn lose_rank(&mut self, rank: u32, reason: &str) {
        self.fail(
            ExitCode::RankLost,
            &format!("rank {rank} was lost: {reason}"),
        );
    }

    /// What the replica cannot go on with: it waits for other ranks, or ends.
    fn fail(&mut self, code: ExitCode, reason: &str) {
        if self.can_recover(code) {
            self.go_down(code, reason);
        } else if !matches!(self.stage, Stage::Down { .. } | Stage::Ended) {
            self.end_replica(code, reason);
        }
    }

    fn end_replica(&mut self, code: ExitCode, reason: &str) {
        if self.is_recovering() {
            self.take_masks();
            self.move_streams();
        }
        // Whoever reads that it failed is sent elsewhere.
        self.set_availability(Availability::Closed);
        self.own().status.fail(code, reason);
        if let Some(group) = &mut self.driver.group {
            group.give_up(code, reason);
        }
        if self.shared().status.has_failed() {
            self.shared().reject_pending();
        }
        self.end_streams(&self.refusal());
        self.flush();
        self.send_failure_to_ranks(code, reason);
        self.stage = Stage::Ended;
    }

    /// Sends Fail to the ranks, those that still load too; one that cannot be reached is gone.
    fn send_failure_to_ranks(&self, code: ExitCode, reason: &str) {
        for rank in self.ranks.iter() {
            let reason = reason.to_owned();
            let _told = self.driver.link.send(
                rank,
                &plait_proto::encode(&Fail { rank, code, reason }.into()),
            );
        }
    }

    fn end_streams(&mut self, error: &ApiError) {
        if let Some(serving) = self.serving_mut() {
            serving.fail_all(error);
        }
    }
}
