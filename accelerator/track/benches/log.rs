//! Measures the cost of logging: the training thread's time for a step that logs 20 scalars, and the time to write and to read a
//! million points. `benches/compare/track_log.py` runs it beside TensorBoard's own writers.
//!
//! `cargo bench -p burn-accelerate-track --bench log -- [--rounds N] [--json]`

use std::error::Error;
use std::time::{Duration, Instant};

use accelerator_track::{Run, RunHistory};

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let (mut rounds, mut is_json) = (5, false);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--rounds" => {
                let number = arguments.next().ok_or("--rounds needs a number")?;
                rounds = number.parse()?;
            }
            "--json" => is_json = true,
            // What `cargo bench` adds.
            "--bench" => {}
            other => return Err(format!("expected --rounds N or --json, found {other}").into()),
        }
    }
    let measured = (0..rounds).map(|_| measure());
    let mut measured = measured.collect::<Result<Vec<_>, _>>()?;
    let log = median(&mut measured, |x| x.log) / STEPS;
    let write = median(&mut measured, |x| x.write);
    let read = median(&mut measured, |x| x.read);
    let points = STEPS as usize * SCALARS;
    if is_json {
        println!(
            r#"{{"log_us":{:.3},"write_s":{:.4},"read_s":{:.4},"points":{points},"rounds":{rounds}}}"#,
            log.as_secs_f64() * 1e6,
            write.as_secs_f64(),
            read.as_secs_f64()
        );
    } else {
        println!("medians of {rounds} rounds of {points} points, {SCALARS} a step:");
        println!("  a step's `log`, in the training thread   {log:>10.2?}");
        println!("  all of it, until the journal is synced   {write:>10.2?}");
        println!("  reading the run                          {read:>10.2?}");
    }
    Ok(())
}

struct Measured {
    log: Duration,
    write: Duration,
    read: Duration,
}

fn measure() -> Result<Measured, Box<dyn Error>> {
    let runs = tempfile::tempdir()?;
    let run = Run::builder("bench").runs_folder(runs.path()).start();
    let run = run?;
    let names: Vec<_> = (0..SCALARS).map(|x| format!("metric-{x}")).collect();
    let started = Instant::now();
    for step in 0..STEPS {
        let values = names.iter().zip(1..);
        let values = values.map(|(name, x)| (name.as_str(), f64::from(x) / f64::from(step + 1)));
        run.log("train", values, step.into(), f64::from(step) / 1000.0);
    }
    let log = started.elapsed();
    let folder = run.folder().to_owned();
    run.finish()?;
    let write = started.elapsed();
    let started = Instant::now();
    let history = RunHistory::read(folder)?;
    let read = started.elapsed();
    let points: usize = history.series.iter().map(|x| x.points.len()).sum();
    assert_eq!(
        (points, history.lost_entries),
        (STEPS as usize * SCALARS, 0)
    );
    Ok(Measured { log, write, read })
}

fn median(measured: &mut [Measured], of: impl Fn(&Measured) -> Duration) -> Duration {
    measured.sort_by_key(&of);
    of(&measured[measured.len() / 2])
}

const STEPS: u32 = 50_000;
const SCALARS: usize = 20;
