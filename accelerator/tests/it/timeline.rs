//! The time of steps: summaries, and traces of all ranks.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Barrier;

use crate::common::{columns, distance, line};
use accelerator::prelude::*;
use accelerator::timeline::StepSummary;
use accelerator::{AcceleratorBuilder, Compression, Overlap};
use burn::nn::{Linear, LinearConfig};
use burn::optim::SgdConfig;
use burn::tensor::Tensor;
use serde_json::Value;

const SIDE: usize = 40;
const PARAMETERS: usize = SIDE * SIDE + SIDE;

/// Trains for `steps` steps on each of two ranks and returns each rank's summary.
fn trained(builder: AcceleratorBuilder, steps: usize) -> Vec<Option<StepSummary>> {
    builder
        .launch(2, |accelerator| {
            let device = accelerator.device();
            let model: Linear = LinearConfig::new(SIDE, SIDE).init(&device);
            let train = LoaderBuilder::new(crate::common::ColumnBatcher)
                .batch_size(2)
                .num_workers(2)
                .build(columns(4 * steps));
            let (mut model, mut optimizer, train) =
                accelerator.prepare((model, SgdConfig::new().init(), train))?;
            for batch in train.epoch(0) {
                let batch = batch?;
                let input = Tensor::<2>::ones([2, SIDE], &device) * batch.values.clone();
                let loss = model.forward(input).powi_scalar(2).mean();
                let gradients = accelerator.backward(loss, &model, &batch)?.clip_norm(1.0);
                model = optimizer.step(0.01, model, gradients);
            }
            let mean = accelerator.mean_step_summary()?;
            assert_eq!(mean.is_some(), accelerator.step_summary().is_some());
            accelerator.finish()?;
            Ok(accelerator.step_summary())
        })
        .unwrap()
}

#[test]
fn nothing_is_noted_where_nobody_asked() {
    assert_eq!(trained(Accelerator::builder(), 2), [None, None]);
}

#[test]
fn phases_share_out_the_step() {
    for summary in trained(Accelerator::builder().step_summary(), 6) {
        let summary = summary.unwrap();
        assert_eq!(summary.steps, 6);
        let phases = [
            summary.data,
            summary.forward,
            summary.backward,
            summary.copying,
            summary.waiting,
            summary.optimizer,
        ];
        for phase in phases {
            assert!(phase.mean > 0.0 && phase.median > 0.0, "{summary}");
        }
        let sum: f64 = phases.iter().map(|phase| phase.mean).sum();
        assert!(
            (sum + summary.other.mean - summary.step.mean).abs() < 1e-6,
            "{summary}"
        );
        // Within a host, ranks wait for operations on the training thread.
        assert!(
            summary.communicating.mean <= summary.waiting.mean,
            "{summary}"
        );
        assert_eq!(summary.exposed, summary.communicating, "{summary}");
        assert_eq!(summary.hidden(), Some(0.0));
        assert!(summary.to_string().contains("6 steps"), "{summary}");
    }
}

#[test]
fn what_is_hidden_is_a_part_of_the_communication() {
    let builder = Accelerator::builder().bucket_size(1024);
    let builder = builder.overlap(Overlap::On).step_summary();
    for summary in trained(builder, 12) {
        let summary = summary.unwrap();
        let (exposed, waiting) = (summary.exposed.mean, summary.waiting.mean);
        assert!(exposed <= summary.communicating.mean, "{summary}");
        assert!(exposed <= waiting, "{summary}");
        let hidden = summary.hidden().unwrap();
        assert!((0.0..=1.0).contains(&hidden), "{summary}");
        let parts = [
            summary.data,
            summary.forward,
            summary.backward,
            summary.copying,
        ];
        let parts = parts.iter().map(|part| part.mean).sum::<f64>();
        let rest = waiting + summary.optimizer.mean + summary.other.mean;
        assert!((parts + rest - summary.step.mean).abs() < 1e-6, "{summary}");
    }
}

#[test]
fn bytes_are_those_of_the_buckets() {
    let bytes = |compression| {
        let builder = Accelerator::builder().compression(compression);
        let [first, second] = &trained(builder.step_summary(), 3)[..] else {
            panic!("two ranks");
        };
        let (first, second) = (first.as_ref().unwrap(), second.as_ref().unwrap());
        assert_eq!(first.bytes, second.bytes);
        assert_eq!(first.bytes.mean, first.bytes.median);
        first.bytes.mean as usize
    };
    // The rest of the traffic is a few numbers.
    let exact = bytes(Compression::None);
    assert!(
        (4 * PARAMETERS..4 * PARAMETERS + 192).contains(&exact),
        "{exact}"
    );
    let half = bytes(Compression::F16);
    assert!(
        (2 * PARAMETERS..2 * PARAMETERS + 192).contains(&half),
        "{half}"
    );
}

#[test]
fn an_accumulated_window_is_one_step() {
    let builder = Accelerator::builder().accumulation_steps(3).step_summary();
    for summary in trained(builder, 6) {
        assert_eq!(summary.unwrap().steps, 2);
    }
}

#[test]
fn a_trace_shows_all_ranks_and_what_they_did() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.json");
    let builder = Accelerator::builder().bucket_size(1024).trace(&path);
    let steps = 5;
    let summaries = trained(builder, steps);
    let trace = read(&path);
    let files: Vec<_> = folder.path().read_dir().unwrap().collect();
    assert_eq!(files.len(), 1, "{files:?}");

    let events = trace["traceEvents"].as_array().unwrap();
    let of = |kind: &str| -> Vec<&Value> { events.iter().filter(|e| e["ph"] == kind).collect() };
    let ranks: BTreeSet<_> = events.iter().map(|e| e["pid"].as_u64().unwrap()).collect();
    assert_eq!(ranks, BTreeSet::from([0, 1]));
    for rank in 0..2_u64 {
        let named = |what: &str| -> Vec<String> {
            let meta = of("M").into_iter();
            meta.filter(|e| e["name"] == what && e["pid"] == rank)
                .map(|e| e["args"]["name"].as_str().unwrap().to_owned())
                .collect()
        };
        assert!(named("process_name")[0].starts_with(&format!("rank {rank} ")));
        let threads = named("thread_name");
        for thread in ["training", "loader 0", "loader 1"] {
            assert!(threads.iter().any(|name| name == thread), "{threads:?}");
        }
        let spans = |name: &str| -> Vec<&Value> {
            let all = of("X").into_iter();
            all.filter(|e| e["pid"] == rank && e["name"] == name)
                .collect()
        };
        for name in [
            "step",
            "forward",
            "backward",
            "optimizer",
            "wait for data",
            "load batch",
        ] {
            assert_eq!(spans(name).len(), steps, "{name}");
        }
        // Each of two buckets has at least one, and so has the control vector.
        assert!(spans("all_reduce").len() >= 3 * steps);
        // Preparing a model shares its layout and its parameters.
        assert!(!spans("all_gather_object").is_empty());
        let waits = spans("wait for all_reduce");
        let about = |part: &Value| {
            waits
                .iter()
                .filter(|e| e["args"]["bucket"] == *part)
                .count()
        };
        assert_eq!(about(&"control".into()), steps);
        assert_eq!(about(&0.into()), steps);
        assert_eq!(
            waits.len(),
            (1..9).map(|n| about(&n.into())).sum::<usize>() + 2 * steps
        );
        let copies = spans("copy").into_iter();
        let filled = copies.filter(|e| e["args"]["bucket"] == 1).count();
        assert_eq!(filled, steps);
        let counters = of("C").into_iter().filter(|e| e["pid"] == rank);
        let bytes: Vec<_> = counters
            .map(|e| e["args"]["bytes"].as_f64().unwrap())
            .collect();
        let summary = summaries[rank as usize].as_ref().unwrap();
        assert_eq!(bytes, vec![summary.bytes.mean; steps]);
        let sent: f64 = spans("all_reduce")
            .iter()
            .map(|e| e["args"]["bytes"].as_f64().unwrap())
            .sum();
        assert_eq!(sent, bytes.iter().sum::<f64>());
        let about = &trace["otherData"]["ranks"][rank as usize];
        assert_eq!(
            (&about["rank"], &about["older_events_dropped"]),
            (&rank.into(), &0.into())
        );
        assert!(about["clock_error_us"].as_f64().unwrap() < 1e6);
    }
    check_nesting(&of("X"));

    // The last operation of a step ends on no rank before it has begun on the other.
    let last = |rank: u64| {
        let all = of("X").into_iter();
        let mut ends: Vec<(f64, f64)> = all
            .filter(|e| e["pid"] == rank && e["name"] == "all_reduce")
            .map(time)
            .collect();
        ends.sort_by(|a, b| a.0.total_cmp(&b.0));
        ends.pop().unwrap()
    };
    let error = 2.0
        * trace["otherData"]["ranks"][1]["clock_error_us"]
            .as_f64()
            .unwrap()
        + 0.01;
    let (first, second) = (last(0), last(1));
    assert!(first.0 <= second.1 + error && second.0 <= first.1 + error);
}

/// Returns when an event began and ended.
fn time(event: &Value) -> (f64, f64) {
    let (start, duration) = (
        event["ts"].as_f64().unwrap(),
        event["dur"].as_f64().unwrap(),
    );
    assert!(start >= 0.0 && duration >= 0.0, "{event}");
    (start, start + duration)
}

/// Asserts that the spans of a thread are nested or disjoint, as viewers require.
fn check_nesting(spans: &[&Value]) {
    let mut threads: BTreeMap<(u64, u64), Vec<(f64, f64)>> = BTreeMap::new();
    for span in spans {
        let thread = (span["pid"].as_u64().unwrap(), span["tid"].as_u64().unwrap());
        threads.entry(thread).or_default().push(time(span));
    }
    assert!(threads.len() >= 6, "{:?}", threads.keys());
    // The unit is the microsecond, rounded to thousandths.
    let nearly = 0.002;
    for (thread, mut times) in threads {
        times.sort_by(|a, b| a.0.total_cmp(&b.0).then(b.1.total_cmp(&a.1)));
        let mut around: Vec<f64> = Vec::new();
        for (start, end) in times {
            around.retain(|outer| *outer > start + nearly);
            for outer in &around {
                assert!(
                    end <= outer + nearly,
                    "{thread:?}: {start}..{end} crosses {outer}"
                );
            }
            around.push(end);
        }
    }
}

fn read(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

#[test]
fn a_rank_that_is_left_alone_writes_its_own_trace() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.json");
    let outcomes = Accelerator::builder()
        .trace(&path)
        .launch(2, |accelerator| {
            if accelerator.rank() == 1 {
                accelerator.group().abort("its disk is full");
                return Ok(true);
            }
            let error = accelerator.finish().unwrap_err();
            Ok(error.is_peer_lost())
        });
    assert_eq!(outcomes.unwrap(), [true, true]);
    assert!(!path.exists());
    let trace = read(&folder.path().join("trace.rank0.json"));
    assert_eq!(trace["otherData"]["ranks"][0]["rank"], 0);
}

#[test]
fn a_loop_that_an_error_ends_leaves_its_own_trace() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.json");
    // All ranks have made the first step.
    let stepped = Barrier::new(3);
    let outcome = Accelerator::builder()
        .trace(&path)
        .launch(3, |accelerator| {
            let parts = (line(&accelerator.device()), SgdConfig::new().init());
            let (mut model, mut optimizer) = accelerator.prepare(parts)?;
            let loader = crate::common::loader(12, 2);
            let train = accelerator.prepare(loader)?;
            for (step, batch) in train.epoch(0).enumerate() {
                let batch = batch?;
                if step == 1 {
                    stepped.wait();
                }
                if step == 1 && accelerator.rank() == 1 {
                    accelerator.group().abort("its disk is full");
                    return Ok(());
                }
                let loss = distance(&model, &batch);
                let gradients = accelerator.backward(loss, &model, &batch)?;
                model = optimizer.step(0.01, model, gradients);
            }
            accelerator.finish()
        });
    assert!(outcome.unwrap_err().is_peer_lost());
    assert!(!path.exists());
    for rank in 0..3 {
        let trace = read(&folder.path().join(format!("trace.rank{rank}.json")));
        assert_eq!(trace["otherData"]["ranks"][0]["rank"], rank);
        let events = trace["traceEvents"].as_array().unwrap();
        let steps = events
            .iter()
            .filter(|e| e["name"] == "step" && e["ph"] == "X");
        assert_eq!(steps.count(), 1);
    }
}

#[test]
fn one_process_that_does_not_finish_leaves_a_trace() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.json");
    let accelerator = Accelerator::builder().trace(&path).build().unwrap();
    let other = accelerator.clone();
    drop(accelerator);
    assert!(!path.exists(), "there is another handle");
    drop(other);
    assert_eq!(read(&path)["otherData"]["ranks"][0]["rank"], 0);
    // A trace is written only once.
    let accelerator = Accelerator::builder().trace(&path).build().unwrap();
    accelerator.finish().unwrap();
    std::fs::remove_file(&path).unwrap();
    drop(accelerator);
    assert!(!path.exists());
}

#[test]
fn a_trace_that_could_not_be_written_is_refused_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let builder = |path: &str| Accelerator::builder().trace(folder.path().join(path));
    let pipe = folder.path().join("pipe");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status();
    assert!(made.unwrap().success());
    for path in ["missing/trace.json", "", "pipe"] {
        let error = builder(path).build().unwrap_err();
        assert!(error.is_config(), "{error:?}");
        assert!(builder(path).launch(1, |_| Ok(())).is_err());
    }
}

#[test]
fn a_trace_that_is_lost_in_the_end_costs_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let inner = folder.path().join("inner");
    std::fs::create_dir(&inner).unwrap();
    let builder = Accelerator::builder().trace(inner.join("trace.json"));
    let accelerator = builder.build().unwrap();
    std::fs::remove_dir(&inner).unwrap();
    accelerator.finish().unwrap();
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn a_loop_without_a_loader_is_noted_too() {
    let accelerator = Accelerator::builder().step_summary().build().unwrap();
    let device = accelerator.device();
    let parts = (
        line(&device),
        SgdConfig::new().init(),
        crate::common::loader(4, 4),
    );
    let (mut model, mut optimizer, train) = accelerator.prepare(parts).unwrap();
    let batch = train.epoch(0).next().unwrap().unwrap();
    for _ in 0..4 {
        let gradients = accelerator
            .backward(distance(&model, &batch), &model, 4)
            .unwrap();
        model = optimizer.step(0.01, model, gradients);
    }
    let summary = accelerator.step_summary().unwrap();
    assert_eq!(summary.steps, 4);
    assert!(summary.forward.median > 0.0 && summary.backward.median > 0.0);
    // A single rank communicates with no other.
    assert_eq!((summary.bytes.mean, summary.hidden()), (0.0, None));
}
