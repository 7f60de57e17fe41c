//! One rank of a test's job. Runs the command of its first argument and prints its result as one line of JSON.

#![allow(
    clippy::expect_used,
    reason = "this program is part of tests; a panic is how they fail"
)]

use std::process::ExitCode;
use std::time::Duration;

use accelerator::Tracker;
use accelerator::metric::Mean;
use accelerator::prelude::*;
use accelerator_tests::fixtures::Training;
use accelerator_tests::{operator, problems, trajectory};
use burn::module::{Lora, Module};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{FloatDType, Tensor};
use serde::Serialize;

/// An error that takes a while to print: a rank that fails with it ends after the others, which fail because of it.
#[derive(Debug)]
struct Slow;

impl std::fmt::Display for Slow {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::thread::sleep(Duration::from_millis(500));
        f.write_str("slow to say")
    }
}

impl std::error::Error for Slow {}

/// Returns the memory that is not a file's, in bytes. Of what several processes have mapped, it is this one's share.
fn proportional_memory() -> Result<u64> {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup")?;
    let sizes = text.lines().filter_map(|line| {
        let size = line
            .strip_prefix("Pss_Anon:")
            .or_else(|| line.strip_prefix("Pss_Shmem:"))?;
        size.trim().strip_suffix(" kB")?.parse::<u64>().ok()
    });
    Ok(1024 * sizes.sum::<u64>())
}

fn main() -> Result<ExitCode> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args[..] {
        ["trajectory", device, case] => {
            let training = Training::load();
            let case = &training.cases[number(case)];
            let accelerator = Accelerator::builder()
                .device(device.parse::<BackendKind>()?)
                .accumulation_steps(case.accumulate)
                .build()?;
            print(&trajectory::run(
                &accelerator,
                case,
                training.problem(case),
            )?);
        }
        ["train", dtype, accumulate, setting] => {
            let builder = Accelerator::builder()
                .device(BackendKind::Flex)
                .dtype(float(dtype))
                .accumulation_steps(number(accumulate))
                // Small, so that even these small networks have several buckets.
                .bucket_size(1024);
            let setting = from_json(setting);
            print(&problems::train(
                &builder.seed(setting.seed).build()?,
                &setting,
            )?);
        }
        ["train-accumulating-by-rank", setting] => {
            let rank: usize = std::env::var("RANK").map_or(0, |rank| number(&rank));
            let builder = Accelerator::builder().accumulation_steps(1 + rank);
            print(&problems::train(&builder.build()?, &from_json(setting))?);
        }
        ["launch-processes", world_size, what] => {
            accelerator::launch_processes(number(world_size), |accelerator| {
                let pid = std::process::id();
                println!("rank in {pid}");
                match what {
                    "fail" if accelerator.rank() == 1 => {
                        return Err(Error::other("no labels here"));
                    }
                    "linger" if accelerator.rank() == 2 => return Err(Error::other(Slow)),
                    "preempt" => {
                        let passed = std::time::SystemTime::now();
                        accelerator.on_preemption(Preemption::new().with_deadline(passed))?;
                        assert!(accelerator.preempted()?);
                        return accelerator.finish_preempted().map(drop);
                    }
                    "sleep" => std::thread::sleep(Duration::from_secs(600)),
                    "nest" if accelerator.is_main_process() => {
                        let mut again = std::process::Command::new(std::env::current_exe()?);
                        let status = again.args(["launch-processes", "2", "work"]).status()?;
                        assert!(status.success(), "{status}");
                    }
                    _ => {}
                }
                accelerator.wait_for_everyone()?;
                accelerator.finish()
            })?;
            println!("behind");
        }
        // Prints the memory in MiB of a rank with a base of 128 MiB, where shared pages count once among all ranks.
        ["frozen-base", world_size] => {
            accelerator::launch_processes(number(world_size), |accelerator| {
                let device = accelerator.device();
                let base: Linear = LinearConfig::new(8192, 4096).init(&device);
                let model = accelerator.prepare(base.apply_lora(Lora::new(2, 4.0)))?;
                accelerator.wait_for_everyone()?;
                let memory = proportional_memory()?;
                let sum = model.forward(Tensor::<2>::ones([1, 8192], &device)).sum();
                let sums = accelerator.gather_object(&sum.into_scalar::<f32>())?;
                assert!(sums.iter().all(|other| *other == sums[0]), "{sums:?}");
                println!("{}", memory >> 20);
                accelerator.wait_for_everyone()?;
                accelerator.finish()
            })?;
        }
        ["search", trials, scheduler, folder] => {
            accelerator_tests::searches::run(trials, scheduler, folder.as_ref())?;
        }
        ["operator", num_workers, folder] => {
            let outcome = operator::train(number(num_workers), folder.as_ref())?;
            print(&outcome);
        }
        ["operator-by-hand"] => print(&operator::by_hand()?),
        ["operator-fails", mishap] => {
            let mishap = serde_json::from_value(mishap.into()).expect("a mishap");
            println!("failed: {}", operator::fail(mishap)?);
        }
        // Ranks as threads still need a process of their own, since Burn fixes the dtype.
        ["train-threads", world_size, dtype, accumulate, setting] => {
            let setting = from_json(setting);
            let builder = Accelerator::builder()
                .device(BackendKind::Flex)
                .dtype(float(dtype))
                .accumulation_steps(number(accumulate))
                .bucket_size(1024);
            let outcomes = builder.launch(number(world_size), |accelerator| {
                problems::train(&accelerator, &setting)
            })?;
            print(&outcomes);
        }
        ["train-by-arguments", file, pushed, job] => {
            let job = serde_json::from_str(job).expect("a job");
            return accelerator_tests::trainers::train(file.as_ref(), pushed.as_ref(), job);
        }
        ["train-resumable", job] => {
            let job: accelerator_tests::resumable::TrainingJob =
                serde_json::from_str(job).expect("a job");
            let mut builder = Accelerator::builder()
                .runs_folder(job.result.with_file_name("runs"))
                .log_with([Tracker::Csv])
                .device(BackendKind::Flex)
                .accumulation_steps(2)
                .seed(5);
            if job.double {
                builder = builder.dtype(FloatDType::F64);
            }
            return accelerator_tests::resumable::train(builder.build()?, &job);
        }
        ["learner", job] => {
            let job = serde_json::from_str(job).expect("a job");
            print(&accelerator_tests::learner::train(&job)?);
        }
        ["connect", seconds] => {
            let timeout = Duration::from_secs(number(seconds) as u64);
            let accelerator = Accelerator::builder().connect_timeout(timeout).build()?;
            print(&accelerator.gather_object(&accelerator.rank())?);
            accelerator.finish()?;
        }
        ["different-calls"] => {
            let accelerator = Accelerator::new()?;
            if accelerator.is_main_process() {
                accelerator.wait_for_everyone()?;
            } else {
                accelerator.reduce_metric(Mean::new())?;
            }
        }
        _ => panic!("unknown task {args:?}"),
    }
    Ok(ExitCode::SUCCESS)
}

fn number(text: &str) -> usize {
    text.parse()
        .unwrap_or_else(|error| panic!("{text}: {error}"))
}

fn float(name: &str) -> FloatDType {
    match name {
        "f32" => FloatDType::F32,
        "f64" => FloatDType::F64,
        _ => panic!("unknown dtype {name}"),
    }
}

fn from_json(text: &str) -> problems::Setting {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{text}: {error}"))
}

fn print(value: &impl Serialize) {
    println!("{}", serde_json::to_string(value).expect("plain data"));
}
