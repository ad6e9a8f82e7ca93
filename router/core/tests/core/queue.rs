//! Claims about the limits of the queue.

use plait_core::Refusal;

use crate::fixtures::{harness, settings, step, with};
use crate::harness::Spec;

#[test]
fn as_much_may_wait_as_the_limits_say_and_what_is_admitted_makes_room() {
    let settings = with(settings(), |it| {
        it.scheduler.max_seqs = Some(1);
        it.scheduler.max_queue = 3;
        it.scheduler.max_queue_tokens = 10;
    });
    let mut harness = harness(settings, [(4, 2)]);
    step(&mut harness);
    for num_prompt in [3, 4, 3] {
        assert!(harness.submit(Spec::new(num_prompt, 2)).is_ok());
    }
    assert_eq!(
        harness.submit(Spec::new(1, 1)),
        Err(Refusal::QueueFull {
            waiting: 3,
            limit: 3
        })
    );
    while harness.scheduler.stats().num_waiting == 3 {
        step(&mut harness);
    }
    assert_eq!(
        harness.submit(Spec::new(4, 1)),
        Err(Refusal::QueueTokensFull {
            waiting: 7,
            limit: 10
        })
    );
    assert!(harness.submit(Spec::new(3, 1)).is_ok());
    harness.run_to_the_end(1);
}
