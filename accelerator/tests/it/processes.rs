//! Operations of ranks other than training.

use std::sync::{Mutex, mpsc};
use std::time::Duration;

use crate::common::{assert_chain, assert_contains, assert_error, child, connected, devices};
use accelerator::collective::internal::StoreServer;
use accelerator::collective::{Launch, Topology, TransportKind};
use accelerator::prelude::*;
use accelerator::{AcceleratorBuilder, GradientReduction, Overlap};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::Tensor;

#[test]
fn tensors_are_gathered_reduced_and_broadcast() {
    for kind in devices() {
        Accelerator::builder()
            .device(kind)
            .launch(2, |accelerator| {
                let device = accelerator.device();
                let rank = accelerator.rank() as f32;
                let list = |tensor: Tensor<1>| tensor.into_data().try_to_vec::<f32>().unwrap();
                // The values are those of Accelerate's own test: rank r holds arange(2) + 1 + 2 r.
                let mine =
                    || Tensor::<1>::from_floats([1.0 + 2.0 * rank, 2.0 + 2.0 * rank], &device);
                assert_eq!(list(accelerator.gather(mine())?), [1.0, 2.0, 3.0, 4.0]);
                assert_eq!(list(accelerator.broadcast(mine(), 0)?), [1.0, 2.0]);
                assert_eq!(list(accelerator.reduce(mine(), ReduceOp::Sum)?), [4.0, 6.0]);
                assert_eq!(
                    list(accelerator.reduce(mine(), ReduceOp::Mean)?),
                    [2.0, 3.0]
                );
                assert_eq!(list(accelerator.reduce(mine(), ReduceOp::Max)?), [3.0, 4.0]);
                let some = mine().narrow(0, 0, 1 + accelerator.rank());
                assert_eq!(list(accelerator.gather(some)?), [1.0, 3.0, 4.0]);
                assert_eq!(accelerator.broadcast_object(&accelerator.rank(), 1)?, 1);
                Ok(())
            })
            .unwrap();
    }
}

#[test]
fn the_main_process_goes_first_or_all_fail() {
    let order = Mutex::new(Vec::new());
    accelerator::launch(3, |accelerator| {
        accelerator.main_process_first(|| {
            if accelerator.is_main_process() {
                std::thread::sleep(Duration::from_millis(50));
            }
            order.lock().unwrap().push(accelerator.rank());
            Ok(())
        })
    })
    .unwrap();
    assert_eq!(order.into_inner().unwrap()[0], 0);

    let errors = accelerator::launch(2, |accelerator| {
        let outcome: Result<()> = accelerator.main_process_first(|| {
            assert!(accelerator.is_main_process(), "the others do not run it");
            Err(Error::other("no batch size"))
        });
        Ok(outcome.unwrap_err())
    })
    .unwrap();
    for error in errors {
        assert_chain(&error, Error::is_other, &["batch size"]);
    }
}

#[test]
fn who_outlives_a_rank_that_panics_hears_what_it_said() {
    let heard = Mutex::new(Vec::new());
    let error = accelerator::launch(3, |accelerator| {
        assert!(accelerator.rank() != 1, "rank one stumbles");
        let error = accelerator.wait_for_everyone().unwrap_err();
        heard.lock().unwrap().push(error);
        Ok(())
    })
    .unwrap_err();
    assert_error(&error, Error::is_panic, &["rank 1", "stumbles"]);
    let heard = heard.into_inner().unwrap();
    assert_eq!(heard.len(), 2);
    for error in heard {
        assert_eq!(error.culprit().unwrap().rank(), 1);
        let words = ["it panicked: rank one stumbles", "tests/it/processes.rs:"];
        assert_error(&error, Error::is_peer_lost, &words);
    }
}

#[test]
fn nobody_sets_the_generator_while_a_model_is_drawn() {
    let accelerator = Accelerator::new().unwrap();
    std::thread::scope(|scope| {
        accelerator.init(|device| {
            let (sender, built) = mpsc::channel();
            scope.spawn(move || {
                let outcome = Accelerator::new();
                // The receiver may be gone once the model is built.
                let _ = sender.send(outcome.map(drop));
            });
            // Another rank of this process joins late and waits for its turn.
            assert!(built.recv_timeout(Duration::from_millis(200)).is_err());
            let line: Linear = LinearConfig::new(2, 2).init(device);
            line
        });
    });
}

#[test]
fn ranks_take_turns() {
    let order = Mutex::new(Vec::new());
    let values = accelerator::launch(3, |accelerator| {
        let rank = accelerator.rank();
        for _ in 0..4 {
            let value = accelerator.in_rank_order(|| {
                order.lock().unwrap().push((rank, "begins"));
                std::thread::yield_now();
                order.lock().unwrap().push((rank, "ends"));
                rank
            })?;
            assert_eq!(value, rank);
        }
        accelerator.in_rank_order(|| Err::<(), _>("its own affair"))
    });
    assert_eq!(values.unwrap(), [Err("its own affair"); 3]);
    let turns = [0, 1, 2].map(|rank| [(rank, "begins"), (rank, "ends")]);
    assert_eq!(order.into_inner().unwrap(), turns.as_flattened().repeat(4));
}

#[test]
fn a_turn_that_communicates_is_told_so_there_and_then() {
    accelerator::launch(2, |accelerator| {
        let inside = accelerator.in_rank_order(|| accelerator.wait_for_everyone())?;
        assert_chain(&inside.unwrap_err(), Error::is_misuse, &["one rank only"]);
        // No rank gets a turn if the others cannot come.
        let ran = accelerator.on_main_process(|| accelerator.in_rank_order(|| panic!("it ran")));
        assert!(ran.is_none_or(|outcome: Result<()>| outcome.unwrap_err().is_misuse()));
        accelerator.wait_for_everyone()
    })
    .unwrap();
}

#[test]
fn a_turn_that_panics_leaves_nobody_waiting() {
    let ran = Mutex::new(Vec::new());
    let outcomes = accelerator::launch(3, |accelerator| {
        let rank = accelerator.rank();
        let turn = || {
            accelerator.in_rank_order(|| {
                ran.lock().unwrap().push(rank);
                assert!(rank != 1, "it stumbles");
            })
        };
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(turn));
        let text = match outcome {
            Err(_) => "panicked".to_owned(),
            Ok(outcome) => {
                let error = outcome.unwrap_err();
                assert!(error.is_panic(), "{error:?}");
                error.to_string()
            }
        };
        // A rank that continues finds the others here.
        accelerator.wait_for_everyone()?;
        Ok(text)
    })
    .unwrap();
    assert_eq!(outcomes[1], "panicked");
    for text in [&outcomes[0], &outcomes[2]] {
        assert_contains(text, &["rank 1", "it stumbles"]);
    }
    assert_eq!(ran.into_inner().unwrap(), [0, 1]);
}

#[test]
fn a_rank_that_does_something_else_is_found_before_anybody_speaks() {
    let errors = accelerator::launch(3, |accelerator| {
        let outcome = match accelerator.rank() {
            2 => accelerator.gather_object(&1).map(drop),
            _ => accelerator.in_rank_order(|| panic!("it ran")),
        };
        Ok(outcome.unwrap_err())
    })
    .unwrap();
    for error in errors {
        let words = ["barrier", "all_gather_object"];
        assert_chain(&error, Error::is_collective, &words);
    }
}

#[test]
fn settings_that_contradict_each_other_are_refused() {
    let builder = Accelerator::builder;
    let tcp = builder().transport(TransportKind::Tcp);
    for (error, word) in [
        (
            builder().transport(TransportKind::Threads).build().err(),
            "launch",
        ),
        (tcp.launch(2, |_| Ok(())).err(), "accel-launch"),
        (builder().launch(0, |_| Ok(())).err(), ""),
        (builder().bucket_size(10).build().err(), "bucket_size"),
    ] {
        assert_error(&error.unwrap(), Error::is_config, &[word]);
    }
}

type Change<'a> = &'a (dyn Fn(AcceleratorBuilder) -> AcceleratorBuilder + Sync);

/// Connects two ranks, each with its own number of local ranks and its own settings.
fn two(ranks: [(usize, Change<'_>); 2]) -> Vec<Result<Accelerator>> {
    let place = |topology: Topology| {
        let (rank, (local, _)) = (topology.rank(), ranks[topology.rank()]);
        topology.with_local(rank % local, local).unwrap()
    };
    connected(2, place, |rank, builder| ranks[rank].1(builder).build())
}

/// Returns the error of two ranks, which must be the same.
fn error_of_both(outcomes: Vec<Result<Accelerator>>) -> Error {
    let [first, second] = outcomes.try_into().unwrap();
    let (first, second) = (first.unwrap_err(), second.unwrap_err());
    assert_eq!(first.to_string(), second.to_string());
    first
}

#[test]
fn ranks_for_which_overlap_comes_to_different_things_are_refused_alike() {
    // The host was started wrongly: rank 0 sees two hosts, and rank 1 sees one.
    let [auto, on, off] = [Overlap::Auto, Overlap::On, Overlap::Off]
        .map(|overlap| move |builder: AcceleratorBuilder| builder.overlap(overlap));
    let error = error_of_both(two([(1, &auto), (2, &auto)]));
    let words = [
        "overlap (set by ACCEL_OVERLAP or `overlap`) differs between ranks: rank 0 has",
        "rank 0 has on (`auto`, on the device `flex`, with 1 of 2 ranks on its host)",
        "rank 1 has off (`auto`, on the device `flex`, with 2 of 2 ranks on its host); every rank must have the same values",
    ];
    assert_error(&error, Error::is_config, &words);
    // The settings may differ if they mean the same.
    for outcomes in [two([(1, &auto), (1, &on)]), two([(2, &off), (2, &auto)])] {
        assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
    }
}

/// The scale that all ranks use would have different bits on each.
#[test]
fn ranks_that_sum_gradients_in_different_places_are_refused_alike() {
    use GradientReduction::{Auto, Nccl, Staged};

    let [auto, staged, nccl] = [Auto, Staged, Nccl]
        .map(|asked| move |builder: AcceleratorBuilder| builder.gradient_reduction(asked));
    let error = error_of_both(two([(2, &staged), (2, &auto)]));
    let words = [
        "where gradients are summed (set by the kind of device, ACCEL_REDUCTION and ACCEL_COMPRESSION; ",
        "rank 0 has on the device (of `flex`), and rank 1 has in memory (of `flex`); every rank must have the same values",
    ];
    assert_error(&error, Error::is_config, &words);
    let outcomes = two([(2, &staged); 2]);
    assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
    // A reduction that is not there is an error before training.
    let error = error_of_both(two([(2, &nccl); 2]));
    assert!(error.is_device(), "{error:?}");
}

/// Starts two ranks that know neither their local ranks nor that they share a host, and returns their outcomes.
fn started_by_hand(ranks: [AcceleratorBuilder; 2]) -> [Result<Accelerator>; 2] {
    let store = StoreServer::bind(("127.0.0.1", 0), 2, None).unwrap();
    let port = store.local_addr().port();
    let launch = |rank: usize| {
        Launch::from_vars(|name| match name {
            "RANK" => Some(rank.to_string()),
            "WORLD_SIZE" => Some("2".to_owned()),
            "MASTER_ADDR" => Some("0.0.0.0".to_owned()),
            "MASTER_PORT" => Some(port.to_string()),
            "ACCEL_STORE" => Some("launcher".to_owned()),
            _ => None,
        })
    };
    std::thread::scope(|scope| {
        let mut number = 0..;
        let threads = ranks.map(|builder| {
            let launch = launch(number.next().unwrap()).unwrap();
            assert!(!launch.topology.is_local_known());
            scope.spawn(move || builder.launched_as(launch).build())
        });
        threads.map(|thread| thread.join().unwrap())
    })
}

#[cfg(target_os = "linux")]
#[test]
fn a_rank_opens_its_device_when_it_knows_its_local_rank() {
    let ranks = started_by_hand([Accelerator::builder(), Accelerator::builder()]);
    let places = ranks.map(|rank| rank.unwrap().topology().to_string());
    let expected = [0, 1].map(|rank| format!("rank {rank} of 2 (local {rank} of 2)"));
    assert_eq!(places, expected);
    // If a rank's device is missing, the others learn why.
    let missing = BackendKind::ALL
        .into_iter()
        .find(|kind| !kind.is_compiled_in());
    let Some(missing) = missing else { return };
    let without = Accelerator::builder().device(missing);
    let [other, without] = started_by_hand([Accelerator::builder(), without]);
    let own = without.unwrap_err();
    assert!(own.is_device(), "{own:?}");
    let word = format!("device `{missing}`");
    assert_error(&other.unwrap_err(), Error::is_peer_lost, &[&word]);
}

#[test]
fn a_program_can_ask_which_life_of_the_job_this_is() {
    let first = Accelerator::new().unwrap();
    assert_eq!(first.restarts(), 0);
    let launch = Launch::from_vars(|name| match name {
        "ACCEL_RESTART" => Some("2".to_owned()),
        _ => None,
    });
    let later = Accelerator::builder()
        .launched_as(launch.unwrap())
        .build()
        .unwrap();
    assert_eq!(later.restarts(), 2);
}

#[test]
fn a_lost_rank_is_named_and_the_deadline_for_silence_is_the_builders() {
    let timeout = Duration::from_millis(700);
    let outcomes = Accelerator::builder()
        .liveness_timeout(timeout)
        .launch(3, |accelerator| {
            assert_eq!(accelerator.group().options().liveness_timeout(), timeout);
            if accelerator.rank() == 2 {
                accelerator.group().abort("its disk is full");
                return Ok(None);
            }
            Ok(accelerator.wait_for_everyone().err())
        })
        .unwrap();
    for error in &outcomes[..2] {
        let error = error.as_ref().unwrap();
        assert!(error.is_peer_lost() && error.is_collective(), "{error:?}");
        let culprit = error.culprit().unwrap();
        assert_eq!((culprit.rank(), culprit.cause()), (2, "its disk is full"));
    }
}

/// Builds in a process whose environment the test below prepares.
#[test]
#[ignore = "a part of another test"]
fn build_in_a_child() {
    let error = Accelerator::new().unwrap_err();
    assert!(error.is_config(), "{error:?}");
    let error = Accelerator::builder().launch(2, |_| Ok(())).unwrap_err();
    assert!(error.is_config(), "{error:?}");
    println!("refused: {error:?}");
}

#[test]
fn a_plan_of_faults_that_cannot_be_carried_out_is_refused() {
    let refused = |plan: &str, word: &str| {
        let (is_well, text) = child("processes::build_in_a_child", "ACCEL_FAULTS", plan);
        assert!(is_well, "{text}");
        assert_contains(&text, &["refused", word]);
    };
    refused("rank=0 step=1 sing", "sing");
    #[cfg(not(feature = "faults"))]
    refused("rank=0 step=1 exit 7", "built without");
}
