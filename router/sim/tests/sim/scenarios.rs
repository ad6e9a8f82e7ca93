//! Loads that put the policies under pressure: who arrives when, and what each tenant gets.

use std::collections::{BTreeMap, BTreeSet};

use plait_sim::{Arrival, Report, TenantSummary};
use serde_json::{Value, json};

use crate::setup::{file, poisson, report, set_up, summary, trace};

fn scenario(profile: &str, rate: f64, num_prompts: u32) -> Value {
    json!({"source": {"scenario": {
        "profile": profile, "rate": rate, "num_prompts": num_prompts, "seed": 0,
    }}})
}

fn arrivals(profile: &str) -> Vec<Arrival> {
    set_up(json!({"load": scenario(profile, 20.0, 1_000)}))
        .unwrap()
        .arrivals
}

fn num_by_tenant(arrivals: &[Arrival]) -> BTreeMap<u32, usize> {
    let mut counts = BTreeMap::new();
    for arrival in arrivals {
        *counts.entry(arrival.tenant).or_default() += 1;
    }
    counts
}

fn of_tenant(report: &Report, tenant: u32) -> &TenantSummary {
    report
        .tenants
        .iter()
        .find(|it| it.tenant == tenant)
        .unwrap()
}

#[test]
fn every_profile_has_its_number_of_requests_at_its_rate_in_order() {
    for profile in [
        "bursts",
        "agents",
        "flood",
        "long-prompt",
        "priorities",
        "conversations",
    ] {
        let arrivals = arrivals(profile);
        assert_eq!(arrivals.len(), 1_000);
        assert!(arrivals.is_sorted_by_key(|it| it.at));
        let seconds = arrivals.last().unwrap().at.0 as f64 / 1e6;
        // The last conversations go on for some minutes.
        let most = if profile == "conversations" {
            900.0
        } else {
            80.0
        };
        assert!((30.0..most).contains(&seconds), "{profile}: {seconds}");
    }
}

#[test]
fn a_burst_comes_at_once_from_one_tenant() {
    let arrivals = arrivals("bursts");
    let mut bursts = arrivals.chunk_by(|a, b| a.at == b.at);
    assert!(bursts.all(|burst| num_by_tenant(burst).len() == 1));
    assert_eq!(num_by_tenant(&arrivals).len(), 8);
}

#[test]
fn agents_that_fan_out_begin_alike_and_end_apart() {
    let arrivals = arrivals("agents");
    let together: Vec<_> = arrivals[..16].iter().map(Arrival::prompt).collect();
    let begins: BTreeSet<_> = together.iter().map(|it| &it[..8_192]).collect();
    let ends: BTreeSet<_> = together.iter().map(|it| &it[8_192..]).collect();
    assert_eq!((begins.len(), ends.len()), (1, 16));
}

#[test]
fn a_turn_begins_with_the_turn_before_it() {
    let arrivals = arrivals("conversations");
    let of_first = |it: &&Arrival| it.prompt()[0] == arrivals[0].prompt()[0];
    let turns: Vec<_> = arrivals
        .iter()
        .filter(of_first)
        .map(Arrival::prompt)
        .collect();
    assert_eq!(turns.len(), 8);
    for pair in turns.windows(2) {
        assert_eq!(pair[1].len(), pair[0].len() + 512);
        assert_eq!(pair[1][..pair[0].len()], pair[0][..]);
    }
}

#[test]
fn conversations_find_their_prefixes_where_they_are_routed_by_them() {
    let found = |routing: &str| {
        summary(json!({
            "load": scenario("conversations", 24.0, 4_000),
            "cluster": {"replicas": 4, "routing": routing},
        }))
    };
    let (aware, in_turn) = (found("prefix-aware"), found("in-turn"));
    assert!(
        aware.prefix_hit_ratio > 2.0 * in_turn.prefix_hit_ratio,
        "{} {}",
        aware.prefix_hit_ratio,
        in_turn.prefix_hit_ratio
    );
    assert!(aware.ttft_seconds.p50 < 0.7 * in_turn.ttft_seconds.p50);
}

#[test]
fn one_tenant_of_fifty_sends_half_of_the_flood() {
    let counts = num_by_tenant(&arrivals("flood"));
    assert_eq!(counts.len(), 50);
    assert!((450..550).contains(&counts[&0]), "{counts:?}");
}

#[test]
fn one_long_prompt_comes_among_the_chats() {
    let arrivals = arrivals("long-prompt");
    let long: Vec<_> = arrivals.iter().filter(|it| it.num_prompt > 2_000).collect();
    assert_eq!(
        long.iter()
            .map(|it| (it.tenant, it.num_prompt))
            .collect::<Vec<_>>(),
        [(1, 130_000)]
    );
}

#[test]
fn by_priority_chats_pass_the_long_answers() {
    let found = |policy| {
        report(json!({
            "load": scenario("priorities", 60.0, 600),
            "scheduler": {"policy": policy, "max_seqs": 64},
        }))
    };
    let (fcfs, priority) = (found("fcfs"), found("priority"));
    let p50 = |report| of_tenant(report, 0).ttft_seconds.p50;
    assert!(p50(&priority) * 2.0 < p50(&fcfs));
}

#[test]
fn what_tenants_asked_for_and_got_adds_up() {
    let found = report(json!({
        "load": scenario("flood", 200.0, 1_000),
        "scheduler": {"policy": "fair", "max_queue": 100},
    }));
    let sum = |count: fn(&TenantSummary) -> u64| found.tenants.iter().map(count).sum::<u64>();
    assert_eq!(sum(|it| it.num_requests), 1_000);
    assert!(found.summary.num_refused > 0);
    assert_eq!(sum(|it| it.num_refused), found.summary.num_refused);
    let (fair, served) = (sum(|it| it.num_fair_tokens), sum(|it| it.num_served_tokens));
    assert!(
        fair <= served && fair + 50 >= served,
        "the same tokens, divided otherwise: {fair} {served}"
    );
}

#[test]
fn tenants_that_requests_are_dealt_to_get_alike_many() {
    let mut load = json!({"source": poisson(50.0, 4_000, 10, 2)});
    load["tenants"] = 4.into();
    let counts = num_by_tenant(&set_up(json!({ "load": load })).unwrap().arrivals);
    assert_eq!(counts.len(), 4);
    assert!(
        counts.values().all(|num| (900..1_100).contains(num)),
        "{counts:?}"
    );
}

#[test]
fn a_line_of_a_trace_may_name_tenant_and_priority() {
    let line = r#"{"timestamp": 0, "input_length": 10, "output_length": 1, "hash_ids": [0], "tenant": 7, "priority": -2}
"#;
    let folder = tempfile::tempdir().unwrap();
    let load = trace(&file(&folder, "t.jsonl", line));
    let arrivals = set_up(json!({ "load": load })).unwrap().arrivals;
    assert_eq!((arrivals[0].tenant, arrivals[0].priority), (7, -2));
}

#[test]
fn prefill_that_a_preemption_repeats_is_counted() {
    let found = |num_pages: u32| {
        summary(json!({
            "load": {"source": poisson(1000.0, 40, 200, 100)},
            "scheduler": {"num_pages": num_pages, "watermark": 0, "prefix_cache": false},
        }))
    };
    let (roomy, small) = (found(1_000), found(40));
    let (roomy, small) = (roomy.prefill_tokens, small.prefill_tokens);
    assert_eq!((roomy.computed, roomy.recomputed), (40 * 200, 0));
    assert!(small.recomputed > 0);
    assert_eq!(small.computed, small.distinct + small.recomputed);
}
