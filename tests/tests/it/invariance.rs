//! The number of ranks does not change the result of a training.

use std::path::Path;

use accelerator_tests::problems::{Clipping, Outcome, Rule, Setting, State, Which};
use accelerator_tests::processes::run_ranks;

fn processes(world_size: usize, dtype: &str, accumulate: usize, setting: &Setting) -> Vec<Outcome> {
    processes_with(&[], world_size, dtype, accumulate, setting)
}

fn processes_with(
    variables: &[(&str, &str)],
    world_size: usize,
    dtype: &str,
    accumulate: usize,
    setting: &Setting,
) -> Vec<Outcome> {
    let setting = serde_json::to_string(setting).unwrap();
    let args = ["train", dtype, &accumulate.to_string(), &setting];
    run_ranks(
        Path::new(env!("CARGO_BIN_EXE_rank")),
        &args,
        world_size,
        |_, command| {
            command.envs(variables.iter().copied());
        },
    )
    .iter()
    .map(|rank| serde_json::from_str(rank.succeeded()).unwrap())
    .collect()
}

fn threads(world_size: usize, dtype: &str, accumulate: usize, setting: &Setting) -> Vec<Outcome> {
    let setting = serde_json::to_string(setting).unwrap();
    let (world_size, accumulate) = (world_size.to_string(), accumulate.to_string());
    let args = ["train-threads", &world_size, dtype, &accumulate, &setting];
    let rank = run_ranks(
        Path::new(env!("CARGO_BIN_EXE_rank")),
        &args,
        1,
        |_, command| {
            for name in ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"] {
                command.env_remove(name);
            }
            command.env_remove("MASTER_ADDR").env_remove("MASTER_PORT");
        },
    )
    .remove(0);
    serde_json::from_str(rank.succeeded()).unwrap()
}

/// Compares ranks with a single one; `bound` is the largest difference allowed in a parameter.
fn check(one: &Outcome, ranks: &[Outcome], bound: f64) {
    for rank in ranks {
        assert_eq!(
            rank.steps, one.steps,
            "every rank steps as often as one alone"
        );
        assert_eq!(
            rank.parameters, ranks[0].parameters,
            "all ranks hold the same bits"
        );
        let distance = rank.distance(one);
        assert!(distance < bound, "{} ranks: {distance:.1e}", ranks.len());
    }
    let part = one.losses.len() / 3;
    let mean = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len() as f64;
    let first = mean(&one.losses[..part]);
    let last = mean(&one.losses[one.losses.len() - part..]);
    assert!(last < first, "the loss fell from {first}, to {last}");
}

/// In the last batch of an epoch, all ranks but one are idle. Of six micro-steps in windows of 4, the last window is
/// short.
fn invariance(net: Which, clipping: Clipping) {
    let setting = Setting {
        clipping,
        epochs: 3,
        ..Setting::of(net)
    };
    for accumulate in [1, 4] {
        let one = processes(1, "f64", accumulate, &setting).remove(0);
        assert_eq!(one.steps, if accumulate == 1 { 18 } else { 6 });
        for world_size in [2, 3] {
            let ranks = processes(world_size, "f64", accumulate, &setting);
            check(&one, &ranks, 1e-9);
            assert_eq!(ranks[0].idle, 0);
            assert_eq!(ranks[1].idle, 3, "idle once an epoch");
        }
        check(&one, &threads(4, "f64", accumulate, &setting), 1e-9);
    }
}

#[test]
fn an_mlp_in_f64_learns_the_same_on_any_number_of_ranks() {
    invariance(Which::Mlp, Clipping::Norm);
}

#[test]
fn a_cnn_in_f64_learns_the_same_on_any_number_of_ranks() {
    invariance(Which::Cnn, Clipping::Norm);
}

#[test]
fn a_transformer_in_f64_learns_the_same_on_any_number_of_ranks() {
    invariance(Which::Transformer, Clipping::Norm);
}

#[test]
fn other_norms_values_and_groups_clip_the_same_on_any_number_of_ranks() {
    invariance(Which::Cnn, Clipping::Manifold);
}

#[test]
fn sgd_in_f32_learns_the_same_to_a_millionth() {
    let setting = Setting {
        optimizer: Rule::Sgd,
        epochs: 3,
        ..Setting::of(Which::Mlp)
    };
    let one = processes(1, "f32", 1, &setting).remove(0);
    check(&one, &processes(2, "f32", 1, &setting), 1e-6);
    check(&one, &threads(3, "f32", 1, &setting), 1e-6);
}

#[test]
fn a_run_repeats_itself_bit_for_bit() {
    let setting = Setting {
        epochs: 1,
        ..Setting::of(Which::Cnn)
    };
    let first = processes(3, "f32", 2, &setting);
    let second = processes(3, "f32", 2, &setting);
    assert_eq!(first[0].parameters, second[0].parameters);
    assert_eq!(first[0].losses, second[0].losses);
    let threads = threads(3, "f32", 2, &setting);
    assert_eq!(
        first[0].parameters, threads[0].parameters,
        "whatever the transport"
    );
}

#[test]
fn when_gradients_are_sent_and_how_changes_no_bit() {
    for net in [Which::Mlp, Which::Cnn, Which::Transformer] {
        let setting = Setting::of(net);
        for accumulate in [1, 4] {
            let run = |overlap, transport| {
                let variables = [("ACCEL_OVERLAP", overlap), ("ACCEL_TRANSPORT", transport)];
                processes_with(&variables, 3, "f32", accumulate, &setting)
            };
            let off = run("off", "tcp");
            for (overlap, transport) in [("on", "tcp"), ("off", "shm"), ("on", "shm")] {
                for outcome in run(overlap, transport) {
                    assert_eq!(
                        outcome.parameters, off[0].parameters,
                        "{overlap}, {transport}"
                    );
                    assert_eq!(outcome.losses, off[0].losses, "{overlap}, {transport}");
                }
            }
        }
    }
}

#[test]
fn where_the_state_of_an_optimizer_lives_changes_no_bit() {
    for net in [Which::Wide, Which::Cnn] {
        let setting = |state| Setting {
            state,
            ..Setting::of(net)
        };
        for world_size in [1, 2, 3] {
            let run = |state| processes(world_size, "f32", 2, &setting(state));
            let whole = run(State::Whole);
            for (sharded, whole) in run(State::Sharded).iter().zip(&whole) {
                assert_eq!(
                    sharded.parameters, whole.parameters,
                    "{net:?}, {world_size} ranks"
                );
                assert_eq!(sharded.losses, whole.losses, "{net:?}, {world_size} ranks");
            }
        }
    }
}

#[test]
fn dropout_follows_the_seed_and_differs_between_ranks() {
    let setting = |seed| Setting {
        optimizer: Rule::Sgd,
        seed,
        dropout: 0.5,
        ..Setting::of(Which::Mlp)
    };
    let run = |seed| processes(2, "f32", 1, &setting(seed)).remove(0).parameters;
    let first = run(1);
    assert_eq!(first, run(1), "the same seed, the same masks");
    assert_ne!(first, run(2), "another seed, other masks");
    // With the same masks on both ranks, two ranks would not match one rank except by chance; and one rank draws other
    // masks than two.
    assert_ne!(
        first,
        processes(1, "f32", 1, &setting(1)).remove(0).parameters
    );
}
