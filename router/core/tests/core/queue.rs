//! Claims about how much may wait.

use plait_core::{Refusal, Settings};

use crate::rules::{settings, step, world};
use crate::world::Spec;

#[test]
fn as_much_may_wait_as_the_limits_say_and_what_is_admitted_makes_room() {
    let settings = Settings {
        max_seqs: 1,
        max_queue: 3,
        max_queue_tokens: 10,
        ..settings()
    };
    let mut world = world(settings, [(4, 2)]);
    step(&mut world);
    for num_prompt in [3, 4, 3] {
        assert!(world.submit(Spec::new(num_prompt, 2)).is_ok());
    }
    assert_eq!(
        world.submit(Spec::new(1, 1)),
        Err(Refusal::QueueFull {
            waiting: 3,
            limit: 3
        })
    );
    while world.scheduler.stats().num_waiting == 3 {
        step(&mut world);
    }
    assert_eq!(
        world.submit(Spec::new(4, 1)),
        Err(Refusal::QueueTokensFull {
            waiting: 7,
            limit: 10
        })
    );
    assert!(world.submit(Spec::new(3, 1)).is_ok());
    world.run_to_the_end(1);
}
