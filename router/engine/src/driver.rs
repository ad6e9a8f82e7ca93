//! The driver thread: it owns the scheduler and the link, and never waits for anything but them.

mod deadlines;
mod grouped;
mod ranks;

pub use grouped::Grouped;

use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender};
use plait_core::Micros;
use plait_proto::{Drain, ExitCode, Fail, Message};

use crate::clock::{micros, since};
use crate::link::Link;
use crate::mailbox::Mail;
use crate::metrics::Rejection;
use crate::muster::{Muster, WarmUp};
use crate::output::StreamEvent;
use crate::serving::Serving;
use crate::settings::EngineSettings;
use crate::shared::{Patience, Shared};
use crate::status::Phase;
use crate::step_trace::StepRecorder;
use crate::text::ApiError;
use crate::text_pool::Admission;

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
    pub outline: Outline,
}

/// What is known of a replica before its ranks have spoken.
pub struct Outline {
    /// As the command line gave them.
    pub settings: EngineSettings,
    /// Longest prompt plus output.
    pub max_model_len: u32,
    /// Tokens of the model.
    pub vocab_size: u32,
    /// How long others may take.
    pub patience: Patience,
}

impl Driver {
    /// Drives the replica until it is closed.
    pub fn run(self) {
        let Outline {
            settings, patience, ..
        } = &self.outline;
        let num_ranks = settings.num_ranks;
        let wheel = Wheel {
            heard: vec![Micros(0); num_ranks as usize],
            lost: None,
            looked: Micros(0),
            resumed: Micros(0),
            is_draining: false,
            is_closed: false,
            stage: Stage::Mustering(Muster::new(num_ranks)),
            num_ranks,
            patience: *patience,
            driver: self,
        };
        wheel.turn_until_closed();
    }
}

/// Where the replica is in its life.
enum Stage {
    /// Ranks load and say Hello.
    Mustering(Muster),
    /// All were welcomed and run step 0.
    WarmingUp {
        warm_up: WarmUp,
        serving: Box<Serving>,
        deadline: Micros,
    },
    /// Steps are made.
    Serving(Box<Serving>),
    /// The ranks were told to leave.
    Leaving {
        has_left: Vec<bool>,
        deadline: Micros,
    },
    /// Drained, failed or closed.
    Over,
}

/// A rank that is gone, while the words that explain it may still be on their way.
struct LostRank {
    /// Who is gone, or misses another.
    rank: u32,
    is_missing_another: bool,
    reason: String,
    deadline: Micros,
}

/// The driver at work.
struct Wheel {
    driver: Driver,
    stage: Stage,
    num_ranks: u32,
    patience: Patience,
    /// When each rank was last heard.
    heard: Vec<Micros>,
    lost: Option<LostRank>,
    /// When this turn decided what is late.
    looked: Micros,
    /// When it last came back much later than it had meant to: the machine was paused, or this process stopped.
    resumed: Micros,
    is_draining: bool,
    is_closed: bool,
}

impl Wheel {
    fn turn_until_closed(mut self) {
        while !self.is_closed {
            let deadline = self.next_deadline();
            let timeout = deadline.map(|deadline| since(self.now(), deadline));
            self.promise_a_turn(timeout);
            let group = self.driver.group.as_ref();
            let others = group.map_or_else(Vec::new, Grouped::poll_items);
            self.driver
                .link
                .wait(self.shared().mailbox.wakeup(), others, timeout);
            self.promise_a_turn(Some(Duration::ZERO));
            self.notice_a_pause(deadline);
            self.hear_ranks();
            self.hear_group();
            self.take_admissions();
            self.take_mail();
            self.looked = self.now();
            self.send_steps();
            self.check_deadlines();
            self.leave_if_drained();
            self.flush();
        }
        self.end_streams(&ApiError::unavailable("the server was stopped"));
        self.flush();
        self.leave_group("it was stopped");
        self.let_ranks_go();
        self.promise_a_turn(None);
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
            Stage::Mustering(_) | Stage::WarmingUp { .. } | Stage::Serving(_) => {
                self.leave_group("it was stopped before all were there");
                self.leave();
            }
            Stage::Leaving { .. } | Stage::Over => {}
        }
    }

    fn rank_ended(&mut self, rank: u32, reason: &str) {
        let is_explained = self.is_explained(rank);
        match &mut self.stage {
            Stage::Leaving { has_left, .. } => {
                if let Some(has_left) = has_left.get_mut(rank as usize) {
                    *has_left = true;
                }
            }
            Stage::Over => {}
            _ if is_explained => {}
            _ => self.await_last_words(rank, false, format!("rank {rank} was lost: {reason}")),
        }
    }

    /// Whether the end of this rank follows from a loss that is known.
    fn is_explained(&self, rank: u32) -> bool {
        let known = self.lost.as_ref();
        known.is_some_and(|lost| !lost.is_missing_another || lost.rank == rank)
    }

    /// A rank that misses another one knows less of the loss than the end of the other's process tells.
    fn rank_missed(&mut self, by: u32, reason: &str) {
        if self.lost.as_ref().is_none_or(|lost| lost.rank == by) {
            self.await_last_words(by, true, format!("rank {by}: {reason}"));
        }
    }

    fn await_last_words(&mut self, rank: u32, is_missing_another: bool, reason: String) {
        self.lost = Some(LostRank {
            rank,
            is_missing_another,
            reason,
            deadline: self.after(self.patience.last_words),
        });
    }

    fn send_steps(&mut self) {
        if self.driver.group.is_some() {
            return self.vote();
        }
        let now = self.looked;
        let Stage::Serving(serving) = &mut self.stage else {
            return;
        };
        while let Some(frames) = serving.next_step(now) {
            if let Err((rank, error)) = self.driver.link.send_all(frames) {
                return self.lose_rank(rank, &format!("it cannot be reached: {error}"));
            }
        }
    }

    fn tell_all(&mut self, message: &Message) {
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

    fn leave_if_drained(&mut self) {
        let Stage::Serving(serving) = &self.stage else {
            return;
        };
        let is_drained = serving.is_idle() && self.has_taken_all();
        if self.is_draining && is_drained && self.driver.group.is_none() {
            self.flush();
            self.leave();
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

    fn leave(&mut self) {
        let drain = plait_proto::encode(&Drain {}.into());
        // A rank that cannot be told is gone, and one that has not joined has nothing to finish.
        let is_told = |rank| self.has_joined(rank) && self.driver.link.send(rank, &drain).is_ok();
        let has_left = (0..self.num_ranks).map(|rank| !is_told(rank)).collect();
        self.stage = Stage::Leaving {
            has_left,
            deadline: self.after(self.patience.bye),
        };
    }

    /// Tells the ranks of a closed engine to leave, where they have not been told yet.
    fn let_ranks_go(&mut self) {
        if !matches!(self.stage, Stage::Leaving { .. } | Stage::Over) {
            self.leave();
        }
    }

    fn has_joined(&self, rank: u32) -> bool {
        match &self.stage {
            Stage::Mustering(muster) => muster.has(rank),
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
        if matches!(self.stage, Stage::Over) {
            return;
        }
        self.shared().status.fail(code, reason);
        if let Some(group) = &mut self.driver.group {
            group.give_up(code, reason);
        }
        self.shared().turn_away();
        self.end_streams(&self.shared().status.refusal());
        self.flush();
        self.dismiss_ranks(code, reason);
        self.stage = Stage::Over;
    }

    /// Tells the ranks that nothing will come any more; one that cannot be told is gone.
    fn dismiss_ranks(&self, code: ExitCode, reason: &str) {
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
