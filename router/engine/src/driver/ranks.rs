//! The ranks' messages, from Hello to Bye.

use plait_proto::{ExitCode, Fail, ForwardDone, Hello, Malformed, Message, StepResult, Welcome};

use super::{EventLoop, ReplicaConfig, Stage};
use crate::handshake::{RejectedPeer, WarmUp};
use crate::link::Received;
use crate::replica_pools::ReplicaPools;
use crate::serving::{Serving, ServingConfig};
use crate::status::{DeviceReport, Phase};
use crate::step::warm_up;

/// How a rank on another host ends, as far as this one can tell.
const LINK_CLOSED: &str = "its link was closed: its process ended, or its host cannot be reached";
/// Messages handled in one pass of the event loop.
const MAX_MESSAGES_A_PASS: usize = 64;

impl EventLoop {
    pub(super) fn receive_from_ranks(&mut self) {
        for _ in 0..MAX_MESSAGES_A_PASS {
            match self.driver.link.receive() {
                None => return,
                Some(Received::UnknownPeer) => {
                    self.own().metrics.num_malformed.inc();
                }
                Some(Received::Malformed(rank, malformed)) => self.drop_peer(rank, &malformed),
                Some(Received::Left(rank)) => self.rank_ended(rank, LINK_CLOSED, false),
                Some(Received::Message(rank, message)) => self.handle(rank, message),
            }
        }
    }

    fn handle(&mut self, rank: u32, message: Message) {
        if let Some(place) = self.ranks.place(rank) {
            self.last_heard[place] = self.now();
        }
        match message {
            Message::Hello(hello) => self.hello(rank, hello),
            Message::StepResult(result) => self.result(rank, &result),
            Message::ForwardDone(done) => self.forward_done(rank, done),
            Message::Heartbeat(_) => {}
            Message::Fail(fail) if fail.code == ExitCode::RankLost => {
                self.rank_reports_peer_lost(rank, &fail.reason);
            }
            Message::Fail(fail) => self.fail(fail.code, &format!("rank {rank}: {}", fail.reason)),
            Message::Bye(_) => self.bye(rank),
            Message::StoreRequest(request) => self.ask_store(rank, request),
            Message::Welcome(_)
            | Message::Plan(_)
            | Message::Vote(_)
            | Message::Decision(_)
            | Message::Drain(_)
            | Message::Join(_)
            | Message::StepMasks(_)
            | Message::StoreReply(_) => {
                let kind = message.kind();
                self.lose_rank(
                    rank,
                    &format!("it sent a {kind:?}, which only engines send"),
                );
            }
        }
    }

    fn hello(&mut self, rank: u32, hello: Hello) {
        let config = self.config.as_ref();
        let config = config.or(self.driver.shared.config_fingerprint.get());
        match &mut self.stage {
            Stage::Handshaking { handshake, .. } if !handshake.has(rank) => {
                match handshake.add(rank, hello, config) {
                    Ok(()) => self.welcome_if_complete(),
                    Err(rejected) => self.reject(rank, rejected),
                }
            }
            // A rank that comes too late is ended by its launcher.
            Stage::ShuttingDown { .. } | Stage::Ended => {}
            _ => self.lose_rank(
                rank,
                "it said Hello a second time: its process was started again",
            ),
        }
    }

    fn reject(&self, rank: u32, rejected: RejectedPeer) {
        let RejectedPeer { code, reason } = rejected;
        tracing::warn!(rank, "a worker was rejected: {reason}");
        let refused = plait_proto::encode(&Fail { rank, code, reason }.into());
        if let Err(error) = self.driver.link.send(rank, &refused) {
            tracing::warn!(rank, "the rejected worker cannot be reached: {error}");
        }
    }

    fn welcome_if_complete(&mut self) {
        let Stage::Handshaking { handshake, kept } = &self.stage else {
            return;
        };
        let Some(hellos) = handshake.complete() else {
            return;
        };
        if kept.is_some() {
            return self.take_back(&hellos);
        }
        let pools = ReplicaPools::of(&hellos);
        let device = DeviceReport::new(&hellos, &pools);
        let page_size = self.driver.replica.settings.pages.page_size;
        let metrics = &self.own().metrics.scheduler;
        metrics.set_cache_bytes(device.cache_bytes(page_size));
        self.own().status.set_device(device);
        if let Some(group) = &self.driver.group {
            group.add_graphs(&hellos);
        }
        match Serving::new(self.serving_config(&pools)) {
            Ok(serving) => {
                let (routes, own) = (&self.shared().routes, self.own().number);
                routes.set_pool(own, pools.num_pages, serving.limits().pool_tokens);
                self.welcome(Box::new(serving), pools);
            }
            Err(error) => self.fail(ExitCode::Settings, &error.to_string()),
        }
    }

    fn serving_config(&self, pools: &ReplicaPools) -> ServingConfig {
        let ReplicaConfig {
            settings,
            max_model_len,
            vocab_size,
            ..
        } = &self.driver.replica;
        ServingConfig {
            settings: settings.for_replica(*max_model_len, pools),
            credit: settings.scheduler.max_in_flight(),
            vocab_size: *vocab_size,
            deadlines: settings.deadlines,
            timeouts: self.timeouts,
            shared: self.driver.shared.clone(),
            own: self.driver.own.clone(),
            recorder: self.driver.recorder.clone(),
            masks: self.driver.masks.clone(),
            kv_events: self
                .driver
                .kv_events
                .as_ref()
                .map(|sender| sender.0.clone()),
        }
    }

    pub(super) fn welcome(&mut self, serving: Box<Serving>, pools: ReplicaPools) {
        let (settings, group) = (serving.settings(), self.driver.group.as_ref());
        let settings_of_engine = &self.driver.replica.settings;
        let limits = serving.limits();
        let welcome = Welcome {
            num_slots: settings.scheduler.num_slots(),
            num_pages: pools.num_pages,
            max_batch_tokens: limits.max_batch_tokens,
            max_rows: limits.max_rows,
            replica: group.map_or(self.own().number, |group| group.replica),
            num_replicas: group.map_or(settings_of_engine.num_replicas, |group| group.num_replicas),
            credit: u32::try_from(serving.credit()).expect("the credit is 1 or 2"),
            other_kinds: pools.other_kinds,
            num_snapshots: pools.num_snapshots.unwrap_or(0),
        };
        let step_0 = warm_up(settings.pages.page_size, &welcome.other_kinds);
        self.stage = Stage::WarmingUp {
            since: self.now(),
            warm_up: WarmUp::new(self.ranks),
            serving,
        };
        self.send_to_all(&welcome.into());
        self.send_to_all(&step_0.into());
    }

    fn result(&mut self, rank: u32, result: &StepResult) {
        let now = self.now();
        match &mut self.stage {
            Stage::WarmingUp { warm_up, .. } if result.step == 0 && !warm_up.has(rank) => {
                warm_up.add(rank);
                self.warmed_up();
            }
            Stage::Serving(serving) if rank == self.ranks.first() => {
                if let Err(invalid) = serving.complete(result, now) {
                    self.lose_rank(rank, &invalid.to_string());
                }
            }
            Stage::Ended | Stage::ShuttingDown { .. } => {}
            _ => self.lose_rank(
                rank,
                &format!("it answered step {}, which is not in flight", result.step),
            ),
        }
    }

    fn forward_done(&mut self, rank: u32, done: ForwardDone) {
        match &mut self.stage {
            Stage::Serving(serving) if rank == self.ranks.first() => {
                serving.forward_done(done.step);
            }
            Stage::Ended | Stage::ShuttingDown { .. } => {}
            _ => self.lose_rank(
                rank,
                &format!(
                    "it asked for the masks of step {}, which are not its",
                    done.step
                ),
            ),
        }
    }

    fn warmed_up(&mut self) {
        self.own().status.add_ready_rank();
        self.stage = match std::mem::replace(&mut self.stage, Stage::Ended) {
            Stage::WarmingUp {
                warm_up,
                mut serving,
                ..
            } if warm_up.is_complete() => {
                let now = self.now();
                self.last_heard.fill(now);
                serving.publish();
                if self.is_recovering() {
                    self.come_back(now);
                } else if self.is_formed() {
                    self.own().status.enter(Phase::Ready);
                }
                Stage::Serving(serving)
            }
            stage => stage,
        };
    }

    fn bye(&mut self, rank: u32) {
        match &mut self.stage {
            Stage::ShuttingDown { has_left, .. } => {
                if let Some(place) = self.ranks.place(rank) {
                    has_left[place] = true;
                }
            }
            Stage::Ended => {}
            _ => self.lose_rank(rank, "it left without being asked to"),
        }
    }

    fn drop_peer(&mut self, rank: u32, malformed: &Malformed) {
        self.own().metrics.num_malformed.inc();
        let reason = format!("it sent a malformed message: {malformed}");
        match &self.stage {
            Stage::Handshaking { handshake, .. } if !handshake.has(rank) => {
                self.reject(
                    rank,
                    RejectedPeer {
                        code: ExitCode::Bug,
                        reason,
                    },
                );
            }
            _ => self.lose_rank(rank, &reason),
        }
    }
}
