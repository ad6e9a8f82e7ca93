//! The driver thread: it owns the scheduler and the link, and never waits for anything but them.

mod deadlines;
mod grouped;
mod ranks;

pub use grouped::Grouped;

use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender};
use plait_core::Micros;
use plait_openai::ApiError;
use plait_proto::{Drain, ExitCode, Fail, Message};

use crate::clock::{micros, since};
use crate::handshake::{Handshake, WarmUp};
use crate::link::Link;
use crate::mailbox::Mail;
use crate::metrics::Rejection;
use crate::output::StreamEvent;
use crate::serving::Serving;
use crate::settings::EngineSettings;
use crate::shared::Shared;
use crate::status::Phase;
use crate::step_trace::StepRecorder;
use crate::text_pool::Admission;
use crate::timeouts::Timeouts;

/// What the driver's thread works with.
pub struct Driver {
    /// The ranks' end.
    pub link: Link,
    /// From the text threads.
    pub admissions: Receiver<Admission>,
    /// To the output thread.
    pub batches: Sender<Vec<StreamEvent>>,
    /// The rest of the engine.
    pub shared: Arc<Shared>,
    /// Where what steps took is kept, if anywhere.
    pub recorder: Option<StepRecorder>,
    /// The replicas that this one steps with, if any.
    pub group: Option<Grouped>,
    /// Known from the start.
    pub replica: ReplicaConfig,
}

/// What is known of a replica before its ranks have spoken.
pub struct ReplicaConfig {
    /// As the command line gave them.
    pub settings: EngineSettings,
    /// Longest prompt plus output.
    pub max_model_len: u32,
    /// Tokens of the model.
    pub vocab_size: u32,
    /// How long others may take.
    pub timeouts: Timeouts,
}

impl Driver {
    /// Drives the replica until it is closed.
    pub fn run(self) {
        let ReplicaConfig {
            settings, timeouts, ..
        } = &self.replica;
        let num_ranks = settings.num_ranks;
        let event_loop = EventLoop {
            last_heard: vec![Micros(0); num_ranks as usize],
            lost: None,
            checked_at: Micros(0),
            resumed_at: Micros(0),
            is_draining: false,
            is_closed: false,
            stage: Stage::Handshaking(Handshake::new(num_ranks)),
            num_ranks,
            timeouts: *timeouts,
            driver: self,
        };
        event_loop.run();
    }
}

/// Where the replica is in its life.
enum Stage {
    /// Ranks load and say Hello.
    Handshaking(Handshake),
    /// All were welcomed and run step 0.
    WarmingUp {
        warm_up: WarmUp,
        serving: Box<Serving>,
        deadline: Micros,
    },
    /// Steps are made.
    Serving(Box<Serving>),
    /// The ranks were told to leave.
    ShuttingDown {
        has_left: Vec<bool>,
        deadline: Micros,
    },
    /// Drained, failed or closed.
    Ended,
}

/// A rank that is gone, while the words that explain it may still be on their way.
struct LostRank {
    /// Who is gone, or misses another.
    rank: u32,
    reports_peer_lost: bool,
    reason: String,
    deadline: Micros,
}

/// The driver at work.
struct EventLoop {
    driver: Driver,
    stage: Stage,
    num_ranks: u32,
    timeouts: Timeouts,
    /// When each rank was last heard.
    last_heard: Vec<Micros>,
    lost: Option<LostRank>,
    /// When this turn decided what is late.
    checked_at: Micros,
    /// When it last came back much later than it had meant to: the machine was paused, or this process stopped.
    resumed_at: Micros,
    is_draining: bool,
    is_closed: bool,
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
                .wait(self.shared().mailbox.wakeup(), others, timeout);
            self.set_watchdog_deadline(Some(Duration::ZERO));
            self.detect_pause(deadline);
            self.receive_from_ranks();
            self.receive_from_group();
            self.take_admissions();
            self.take_mail();
            self.checked_at = self.now();
            self.send_steps();
            self.check_deadlines();
            self.shut_down_if_drained();
            self.flush();
        }
        self.end_streams(&ApiError::unavailable("the server was stopped"));
        self.flush();
        self.leave_group("it was stopped");
        self.shut_ranks_down();
        self.set_watchdog_deadline(None);
    }

    fn shared(&self) -> &Shared {
        &self.driver.shared
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
            if self.shared().intake.leave(admission.stream) {
                self.admit(admission);
            }
        }
    }

    fn admit(&mut self, admission: Admission) {
        let now = self.now();
        if let Stage::Serving(serving) = &mut self.stage {
            serving.admit(admission, now);
        } else {
            let error = self.shared().status.refusal();
            self.shared().metrics.requests.reject(Rejection::NotReady);
            self.shared().outbox.put_error(admission.stream, &error);
        }
    }

    fn take_mail(&mut self) {
        for mail in self.shared().mailbox.take() {
            match (mail, &mut self.stage) {
                (Mail::Close, _) => self.is_closed = true,
                (Mail::Drain, _) => self.drain(),
                (Mail::RankEnded { rank, reason }, _) => self.rank_ended(rank, &reason),
                (Mail::Abort(stream), Stage::Serving(serving)) => serving.abort(stream),
                (Mail::StopString(request), Stage::Serving(serving)) => serving.stop(request),
                (Mail::Abort(_) | Mail::StopString(_), _) => {}
            }
        }
    }

    fn drain(&mut self) {
        self.is_draining = true;
        match self.stage {
            Stage::Serving(_) if self.is_formed() => self.shared().status.enter(Phase::Draining),
            Stage::Handshaking(_) | Stage::WarmingUp { .. } | Stage::Serving(_) => {
                self.leave_group("it was stopped before all were there");
                self.start_shutdown();
            }
            Stage::ShuttingDown { .. } | Stage::Ended => {}
        }
    }

    fn rank_ended(&mut self, rank: u32, reason: &str) {
        let is_explained = self.is_explained(rank);
        match &mut self.stage {
            Stage::ShuttingDown { has_left, .. } => {
                if let Some(has_left) = has_left.get_mut(rank as usize) {
                    *has_left = true;
                }
            }
            Stage::Ended => {}
            _ if is_explained => {}
            _ => self.start_error_grace(rank, false, format!("rank {rank} was lost: {reason}")),
        }
    }

    /// Whether the end of this rank follows from a loss that is known.
    fn is_explained(&self, rank: u32) -> bool {
        let known = self.lost.as_ref();
        known.is_some_and(|lost| !lost.reports_peer_lost || lost.rank == rank)
    }

    /// A rank that misses another one knows less of the loss than the end of the other's process tells.
    fn rank_reports_peer_lost(&mut self, by: u32, reason: &str) {
        if self.lost.as_ref().is_none_or(|lost| lost.rank == by) {
            self.start_error_grace(by, true, format!("rank {by}: {reason}"));
        }
    }

    fn start_error_grace(&mut self, rank: u32, reports_peer_lost: bool, reason: String) {
        self.lost = Some(LostRank {
            rank,
            reports_peer_lost,
            reason,
            deadline: self.after(self.timeouts.error_grace),
        });
    }

    fn send_steps(&mut self) {
        if self.driver.group.is_some() {
            return self.vote();
        }
        let now = self.checked_at;
        let Stage::Serving(serving) = &mut self.stage else {
            return;
        };
        while let Some(frames) = serving.next_step(now) {
            if let Err((rank, error)) = self.driver.link.send_all(frames) {
                return self.lose_rank(rank, &format!("it cannot be reached: {error}"));
            }
        }
    }

    fn send_to_all(&mut self, message: &Message) {
        if let Err((rank, error)) = self.driver.link.send_all(&plait_proto::encode(message)) {
            self.lose_rank(rank, &format!("it cannot be reached: {error}"));
        }
    }

    fn flush(&mut self) {
        let Stage::Serving(serving) = &mut self.stage else {
            return;
        };
        let events = serving.take_events();
        serving.publish();
        if !events.is_empty() {
            // Nobody listens only when the output thread has panicked, which its sentinel tells.
            let _delivered = self.driver.batches.send(events);
        }
    }

    fn shut_down_if_drained(&mut self) {
        let Stage::Serving(serving) = &self.stage else {
            return;
        };
        let is_drained = serving.is_idle() && self.has_taken_all();
        if self.is_draining && is_drained && self.driver.group.is_none() {
            self.flush();
            self.start_shutdown();
        }
    }

    /// Nobody is on the way to the scheduler.
    fn has_taken_all(&self) -> bool {
        self.shared().intake.is_empty() && self.driver.admissions.is_empty()
    }

    fn leave_group(&mut self, reason: &str) {
        if let Some(group) = &mut self.driver.group {
            group.give_up(ExitCode::RankLost, reason);
        }
    }

    fn start_shutdown(&mut self) {
        let drain = plait_proto::encode(&Drain {}.into());
        // A rank that cannot be told is gone, and one that has not joined has nothing to finish.
        let is_told = |rank| self.has_joined(rank) && self.driver.link.send(rank, &drain).is_ok();
        let has_left = (0..self.num_ranks).map(|rank| !is_told(rank)).collect();
        self.stage = Stage::ShuttingDown {
            has_left,
            deadline: self.after(self.timeouts.bye),
        };
    }

    /// Tells the ranks of a closed engine to leave, where they have not been told yet.
    fn shut_ranks_down(&mut self) {
        if !matches!(self.stage, Stage::ShuttingDown { .. } | Stage::Ended) {
            self.start_shutdown();
        }
    }

    fn has_joined(&self, rank: u32) -> bool {
        match &self.stage {
            Stage::Handshaking(handshake) => handshake.has(rank),
            _ => true,
        }
    }

    fn lose_rank(&mut self, rank: u32, reason: &str) {
        self.fail(
            ExitCode::RankLost,
            &format!("rank {rank} was lost: {reason}"),
        );
    }

    fn fail(&mut self, code: ExitCode, reason: &str) {
        if matches!(self.stage, Stage::Ended) {
            return;
        }
        self.shared().status.fail(code, reason);
        if let Some(group) = &mut self.driver.group {
            group.give_up(code, reason);
        }
        self.shared().reject_pending();
        self.end_streams(&self.shared().status.refusal());
        self.flush();
        self.send_failure_to_ranks(code, reason);
        self.stage = Stage::Ended;
    }

    /// Tells the ranks that nothing will come any more; one that cannot be told is gone.
    fn send_failure_to_ranks(&self, code: ExitCode, reason: &str) {
        for rank in (0..self.num_ranks).filter(|rank| self.has_joined(*rank)) {
            let reason = reason.to_owned();
            let _told = self.driver.link.send(
                rank,
                &plait_proto::encode(&Fail { rank, code, reason }.into()),
            );
        }
    }

    fn end_streams(&mut self, error: &ApiError) {
        if let Stage::Serving(serving) = &mut self.stage {
            serving.fail_all(error);
        }
    }
}
