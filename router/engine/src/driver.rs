//! The driver thread: it owns the scheduler and the link, and never waits for anything but them.

use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender};
use plait_core::Micros;
use plait_proto::{Drain, ExitCode, Fail, Hello, Malformed, Message, StepResult, Welcome};

use crate::clock::{micros, since};
use crate::link::{Link, Received};
use crate::mailbox::Mail;
use crate::metrics::Rejection;
use crate::muster::{Muster, Stranger, WarmUp, num_pages};
use crate::output::StreamEvent;
use crate::serving::{Serving, ServingParts};
use crate::settings::EngineSettings;
use crate::shared::{Patience, Shared};
use crate::status::{DeviceReport, Phase};
use crate::step::{warm_up, warm_up_deadline};
use crate::text::ApiError;
use crate::text_pool::Admission;

/// Messages taken from the link before anything else is looked at.
const MAX_MESSAGES_A_TURN: usize = 64;

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

/// A rank whose process has ended; its own Fail may still be on its way.
struct LostRank {
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
    is_draining: bool,
    is_closed: bool,
}

impl Wheel {
    fn turn_until_closed(mut self) {
        while !self.is_closed {
            let timeout = self
                .next_deadline()
                .map(|deadline| since(self.now(), deadline));
            self.driver
                .link
                .wait(self.shared().mailbox.wakeup(), timeout);
            self.hear_ranks();
            self.take_admissions();
            self.take_mail();
            self.send_steps();
            self.check_deadlines();
            self.leave_if_drained();
            self.flush();
        }
        self.end_streams(&ApiError::unavailable("the server was stopped"));
        self.flush();
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

    // What ranks say.

    fn hear_ranks(&mut self) {
        for _ in 0..MAX_MESSAGES_A_TURN {
            match self.driver.link.receive() {
                None => return,
                Some(Received::Stranger) => {
                    self.shared().metrics.num_malformed.inc();
                }
                Some(Received::Malformed(rank, malformed)) => self.drop_peer(rank, &malformed),
                Some(Received::Message(rank, message)) => self.hear(rank, message),
            }
        }
    }

    fn hear(&mut self, rank: u32, message: Message) {
        self.heard[rank as usize] = self.now();
        match message {
            Message::Hello(hello) => self.hello(rank, hello),
            Message::StepResult(result) => self.result(rank, &result),
            Message::Beat(_) => {}
            Message::Fail(fail) => self.fail(fail.code, &format!("rank {rank}: {}", fail.reason)),
            Message::Bye(_) => self.bye(rank),
            Message::Welcome(_)
            | Message::Plan(_)
            | Message::Vote(_)
            | Message::Verdict(_)
            | Message::Drain(_) => {
                let kind = message.kind();
                self.lose_rank(
                    rank,
                    &format!("it sent a {kind:?}, which only the engine sends"),
                );
            }
        }
    }

    fn hello(&mut self, rank: u32, hello: Hello) {
        let config = self.driver.shared.config_fingerprint.get();
        match &mut self.stage {
            Stage::Mustering(muster) if !muster.has(rank) => {
                match muster.add(rank, hello, config) {
                    Ok(()) => self.welcome_if_complete(),
                    Err(stranger) => self.refuse(rank, stranger),
                }
            }
            // Who comes too late is ended by who started it.
            Stage::Leaving { .. } | Stage::Over => {}
            _ => self.lose_rank(
                rank,
                "it said Hello a second time: its process was started again",
            ),
        }
    }

    fn refuse(&self, rank: u32, stranger: Stranger) {
        let Stranger { code, reason } = stranger;
        tracing::warn!(rank, "a worker was refused: {reason}");
        let refused = plait_proto::encode(&Fail { rank, code, reason }.into());
        if let Err(error) = self.driver.link.send(rank, &refused) {
            tracing::warn!(rank, "the refused worker could not be told: {error}");
        }
    }

    fn welcome_if_complete(&mut self) {
        let Stage::Mustering(muster) = &self.stage else {
            return;
        };
        let Some(hellos) = muster.complete() else {
            return;
        };
        let num_pages = num_pages(&hellos);
        self.shared()
            .status
            .set_device(DeviceReport::new(&hellos, num_pages));
        match Serving::new(self.serving_parts(num_pages)) {
            Ok(serving) => self.welcome(Box::new(serving)),
            Err(error) => self.fail(ExitCode::Settings, &error.to_string()),
        }
    }

    fn serving_parts(&self, num_pages: u32) -> ServingParts {
        let Outline {
            settings,
            max_model_len,
            vocab_size,
            ..
        } = &self.driver.outline;
        ServingParts {
            settings: settings.scheduler(*max_model_len, num_pages),
            credit: settings.credit(),
            vocab_size: *vocab_size,
            patience: self.patience,
            shared: self.driver.shared.clone(),
        }
    }

    fn welcome(&mut self, serving: Box<Serving>) {
        let settings = serving.settings();
        let welcome = Welcome {
            num_slots: settings.max_seqs,
            num_pages: settings.num_pages,
            max_batch_tokens: settings.max_batch_tokens,
            max_rows: settings.max_rows,
            replica: 0,
            num_replicas: 1,
            credit: u32::try_from(serving.credit()).expect("the credit is 1 or 2"),
        };
        let step_0 = warm_up(settings.page_size);
        self.stage = Stage::WarmingUp {
            warm_up: WarmUp::new(self.num_ranks),
            serving,
            deadline: warm_up_deadline(self.now(), &self.patience),
        };
        self.tell_all(&welcome.into());
        self.tell_all(&step_0.into());
    }

    fn result(&mut self, rank: u32, result: &StepResult) {
        let now = self.now();
        match &mut self.stage {
            Stage::WarmingUp { warm_up, .. } if result.step == 0 && !warm_up.has(rank) => {
                warm_up.add(rank);
                self.warmed_up();
            }
            Stage::Serving(serving) if rank == 0 => {
                if let Err(breach) = serving.land(result, now) {
                    self.lose_rank(rank, &breach.to_string());
                }
            }
            Stage::Over | Stage::Leaving { .. } => {}
            _ => self.lose_rank(
                rank,
                &format!(
                    "it answered step {}, which it was not asked for",
                    result.step
                ),
            ),
        }
    }

    fn warmed_up(&mut self) {
        self.shared().status.add_ready_rank();
        self.stage = match std::mem::replace(&mut self.stage, Stage::Over) {
            Stage::WarmingUp {
                warm_up, serving, ..
            } if warm_up.is_complete() => {
                let now = self.now();
                self.heard.fill(now);
                serving.publish();
                self.shared().status.enter(Phase::Ready);
                Stage::Serving(serving)
            }
            stage => stage,
        };
    }

    fn bye(&mut self, rank: u32) {
        match &mut self.stage {
            Stage::Leaving { has_left, .. } => has_left[rank as usize] = true,
            Stage::Over => {}
            _ => self.lose_rank(rank, "it left without being asked to"),
        }
    }

    fn drop_peer(&mut self, rank: u32, malformed: &Malformed) {
        self.shared().metrics.num_malformed.inc();
        let reason = format!("it sent a malformed message: {malformed}");
        match &self.stage {
            Stage::Mustering(muster) if !muster.has(rank) => {
                self.refuse(
                    rank,
                    Stranger {
                        code: ExitCode::Bug,
                        reason,
                    },
                );
            }
            _ => self.lose_rank(rank, &reason),
        }
    }

    // What other threads say.

    fn take_admissions(&mut self) {
        while let Ok(admission) = self.driver.admissions.try_recv() {
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
            Stage::Serving(_) => self.shared().status.enter(Phase::Draining),
            Stage::Mustering(_) | Stage::WarmingUp { .. } => self.leave(),
            Stage::Leaving { .. } | Stage::Over => {}
        }
    }

    fn rank_ended(&mut self, rank: u32, reason: &str) {
        match &mut self.stage {
            Stage::Leaving { has_left, .. } => {
                if let Some(has_left) = has_left.get_mut(rank as usize) {
                    *has_left = true;
                }
            }
            Stage::Over => {}
            _ if self.lost.is_some() => {}
            _ => {
                let reason = format!("rank {rank} was lost: {reason}");
                self.lost = Some(LostRank {
                    reason,
                    deadline: self.after(self.patience.last_words),
                });
            }
        }
    }

    // What the driver does.

    fn send_steps(&mut self) {
        let now = self.now();
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
        let is_drained = serving.is_idle()
            && self.shared().intake.is_empty()
            && self.driver.admissions.is_empty();
        if self.is_draining && is_drained {
            self.flush();
            self.leave();
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

    fn has_joined(&self, rank: u32) -> bool {
        match &self.stage {
            Stage::Mustering(muster) => muster.has(rank),
            _ => true,
        }
    }

    // What goes wrong.

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

    fn next_deadline(&self) -> Option<Micros> {
        let stage = match &self.stage {
            Stage::WarmingUp { deadline, .. } | Stage::Leaving { deadline, .. } => Some(*deadline),
            Stage::Serving(serving) => self.next_complaint(serving),
            Stage::Mustering(_) | Stage::Over => None,
        };
        let lost = self.lost.as_ref().map(|lost| lost.deadline);
        stage.into_iter().chain(lost).min()
    }

    /// When a step is overdue or a beat late, unless that is known already.
    fn next_complaint(&self, serving: &Serving) -> Option<Micros> {
        let now = self.now();
        let stuck = serving.oldest_deadline();
        let late = self.beat_deadline();
        stuck
            .into_iter()
            .chain(late)
            .filter(|deadline| *deadline > now)
            .min()
    }

    fn beat_deadline(&self) -> Option<Micros> {
        let earliest = self.heard.iter().min()?;
        Some(Micros(earliest.0 + micros(self.patience.beat)))
    }

    fn check_deadlines(&mut self) {
        let now = self.now();
        if let Some(lost) = self.lost.take_if(|lost| lost.deadline <= now) {
            self.fail(ExitCode::RankLost, &lost.reason);
        }
        match &self.stage {
            Stage::WarmingUp { deadline, .. } if *deadline <= now => {
                self.fail(
                    ExitCode::RankLost,
                    "a rank did not answer the warm-up step in time",
                );
            }
            Stage::Leaving { has_left, deadline }
                if *deadline <= now || has_left.iter().all(|left| *left) =>
            {
                self.shared().status.enter(Phase::Stopped);
                self.stage = Stage::Over;
            }
            Stage::Serving(serving) => self.complain(serving, now),
            _ => {}
        }
    }

    fn complain(&self, serving: &Serving, now: Micros) {
        let is_past = |deadline: Option<Micros>| deadline.is_some_and(|deadline| deadline <= now);
        let (stuck, late) = (
            is_past(serving.oldest_deadline()),
            is_past(self.beat_deadline()),
        );
        if self.shared().status.set_stuck(stuck) {
            tracing::warn!(
                "{}",
                if stuck {
                    "a step is overdue"
                } else {
                    "the overdue step was answered"
                }
            );
        }
        if self.shared().status.set_late(late) {
            tracing::warn!(
                "{}",
                if late {
                    "a rank's beat is late"
                } else {
                    "the late rank beats again"
                }
            );
        }
    }
}
