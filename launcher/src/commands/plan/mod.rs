//! `accel-launch plan`: which rank gets which sample.

mod tokens;

use std::error::Error;
use std::io::{self, BufWriter, ErrorKind, Write};
use std::process::ExitCode;

use accelerator_plan::{
    BatchKind, BatchSize, EpochPlan, Order, PlanConfig, PlannedBatch, TailPolicy,
};
use clap::Args;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};

use self::tokens::{TokenArgs, TokenPlan};

/// Shows which rank gets which samples, batch by batch.
///
/// Starts nothing: the plan depends only on these options and on the lengths, and a training program
/// with the same settings follows it.
#[derive(Args, Clone, Debug)]
pub(crate) struct PlanArgs {
    /// The number of samples in the data set.
    #[arg(
        long,
        value_name = "N",
        required_unless_present_any = BY_TOKENS,
        conflicts_with_all = BY_TOKENS
    )]
    samples: Option<u64>,

    /// The number of samples in a batch of one rank; with --split-batches, of all ranks together.
    #[arg(
        long,
        value_name = "B",
        required_unless_present_any = BY_TOKENS,
        conflicts_with_all = BY_TOKENS
    )]
    batch_size: Option<usize>,

    #[command(flatten)]
    tokens: TokenArgs,

    /// The number of ranks.
    #[arg(long, value_name = "W")]
    world_size: usize,

    /// The policy for the last samples, if they do not fill a batch on every rank
    /// [default: exact; with --iterable: pad].
    #[arg(long, value_name = "POLICY", value_parser = tail_parser())]
    tail: Option<TailPolicy>,

    /// Divide every batch of B samples over the ranks; B must be a multiple of W.
    #[arg(long, conflicts_with_all = BY_TOKENS)]
    split_batches: bool,

    /// The same as --tail drop. It overrides --tail pad and --tail uneven; with --tail exact, it is an error.
    #[arg(long)]
    drop_last: bool,

    /// Plan as Accelerate shards an iterable data set: padded, unless another tail is given.
    ///
    /// With --tail pad or drop, the batches are the same as for a data set that is read by index.
    #[arg(long, conflicts_with_all = BY_TOKENS)]
    iterable: bool,

    /// Shuffle with this seed.
    #[arg(long, value_name = "SEED")]
    shuffle: Option<u64>,

    /// The epoch to show; shuffled epochs have different orders.
    #[arg(long, value_name = "E", default_value_t = 0)]
    epoch: u64,

    /// Show the rest of the epoch after this number of samples. With --lengths, a batch must end there.
    #[arg(long, value_name = "OFFSET", default_value_t = 0)]
    start: u64,

    /// Print every rank's batches as JSON: an object whose `ranks` is a list of ranks, each a list
    /// of batches, each a list of samples.
    ///
    /// Padding is included. Batches that only keep an idle rank busy are left out, since their
    /// samples belong to another batch.
    #[arg(long)]
    json: bool,
}

/// The options of a plan by tokens.
const BY_TOKENS: [&str; 3] = ["lengths", "max_tokens", "pack"];

/// Prints the plan while it is computed. A plan of samples needs no memory, however large it is; one by tokens holds the
/// lengths and batches.
///
/// A closed pipe is no error.
///
/// # Errors
/// When an option is wrong: the error names it and the remedy. When the output cannot be written.
pub(crate) fn run(args: &PlanArgs) -> crate::error::Result<ExitCode> {
    write_plan(args, &mut io::stdout().lock())
        .map_err(|error| crate::error::Error::usage(error.to_string()))?;
    Ok(ExitCode::SUCCESS)
}

fn write_plan(args: &PlanArgs, out: &mut impl Write) -> Result<(), Box<dyn Error>> {
    let plan = args.plan()?;
    let mut out = BufWriter::new(out);
    let written = match args.json {
        true => write_json(&plan, &mut out),
        false => write_table(args, &plan, &mut out),
    };
    match written.and_then(|()| out.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(format!("cannot write the plan: {error}").into())
        }
        _ => Ok(()),
    }
}

/// The plan of an epoch, by samples or by tokens.
enum PlannedEpoch {
    Samples(EpochPlan),
    Tokens(TokenPlan),
}

impl PlannedEpoch {
    fn world_size(&self) -> usize {
        match self {
            Self::Samples(epoch) => epoch.plan().world_size(),
            Self::Tokens(plan) => plan.world_size(),
        }
    }

    fn steps(&self, rank: usize) -> u64 {
        match self {
            Self::Samples(epoch) => epoch.steps(rank),
            Self::Tokens(plan) => plan.steps(rank),
        }
    }

    /// The batches of a rank.
    fn rank(&self, rank: usize) -> Box<dyn Iterator<Item = PlannedBatch> + '_> {
        match self {
            Self::Samples(epoch) => Box::new(epoch.rank(rank)),
            Self::Tokens(plan) => Box::new(plan.rank(rank)),
        }
    }
}

impl PlanArgs {
    fn plan(&self) -> Result<PlannedEpoch, Box<dyn Error>> {
        let tail = self.tail_policy()?;
        let by_tokens =
            self.tokens
                .plan(self.world_size, tail, self.shuffle, self.epoch, self.start)?;
        match by_tokens {
            Some(plan) => Ok(PlannedEpoch::Tokens(plan)),
            None => self.epoch_plan(tail).map(PlannedEpoch::Samples),
        }
    }

    fn epoch_plan(&self, tail: TailPolicy) -> Result<EpochPlan, Box<dyn Error>> {
        // Both are required unless the plan is by tokens.
        let (samples, batch_size) = (self.samples.unwrap_or(0), self.batch_size.unwrap_or(0));
        let batch_size = match self.split_batches {
            true => BatchSize::global(batch_size),
            false => BatchSize::per_rank(batch_size),
        };
        let order = match self.shuffle {
            Some(seed) => Order::Shuffled { seed },
            None => Order::Sequential,
        };
        batch_size
            .and_then(|batch_size| {
                PlanConfig::new(samples, batch_size)
                    .with_world_size(self.world_size)
                    .with_tail(tail)
                    .with_order(order)
                    .init()
            })
            .and_then(|plan| plan.epoch(self.epoch).starting_at(self.start))
            .map_err(|error| format!("{}: {error}", self.option_of(&error)).into())
    }

    fn tail_policy(&self) -> Result<TailPolicy, Box<dyn Error>> {
        match (self.tail, self.drop_last) {
            (Some(TailPolicy::Exact), true) => Err(
                "--drop-last leaves the last samples out, --tail exact uses every sample: give one of them".into(),
            ),
            (_, true) => Ok(TailPolicy::Drop),
            (Some(tail), false) => Ok(tail),
            (None, false) if self.iterable => Ok(TailPolicy::Pad),
            (None, false) => Ok(TailPolicy::default()),
        }
    }

    /// The options that an error of the plan speaks of, as they were written.
    fn option_of(&self, error: &accelerator_plan::Error) -> String {
        if error.is_world_size() {
            format!("--world-size {}", self.world_size)
        } else if error.is_start() {
            format!("--start {}", self.start)
        } else if error.is_batch_size() {
            let split = if self.split_batches {
                " --split-batches"
            } else {
                ""
            };
            let size = self.batch_size.unwrap_or(0);
            format!("--batch-size {size}{split}")
        } else {
            "--samples, --batch-size and --world-size".to_owned()
        }
    }
}

fn tail_parser() -> impl TypedValueParser<Value = TailPolicy> {
    PossibleValuesParser::new([
        PossibleValue::new("exact")
            .help("divide them over the ranks as evenly as possible, without duplicates"),
        PossibleValue::new("pad")
            .help("fill up from the start of the epoch (Accelerate's even_batches=True)"),
        PossibleValue::new("drop").help("leave them out (Accelerate's drop_last=True)"),
        PossibleValue::new("uneven")
            .help("give the first ranks theirs, the others none (Accelerate's even_batches=False)"),
    ])
    .try_map(|word| word.parse())
}

fn write_json(plan: &PlannedEpoch, out: &mut impl Write) -> io::Result<()> {
    out.write_all(b"{\"ranks\": [")?;
    for rank in 0..plan.world_size() {
        out.write_all(if rank == 0 { b"[" } else { b", [" })?;
        for (position, batch) in plan.rank(rank).filter(|batch| !batch.is_idle()).enumerate() {
            out.write_all(if position == 0 { b"[" } else { b",[" })?;
            write_joined(&batch.indices, ",", out)?;
            out.write_all(b"]")?;
        }
        out.write_all(b"]")?;
    }
    out.write_all(b"]}\n")
}

fn write_table(args: &PlanArgs, plan: &PlannedEpoch, out: &mut impl Write) -> io::Result<()> {
    match plan {
        PlannedEpoch::Samples(epoch) => write_heading(epoch, out)?,
        PlannedEpoch::Tokens(tokens) => tokens.write_heading(out)?,
    }
    let order = match (args.shuffle, plan) {
        (Some(seed), _) => format!("shuffled with seed {seed}"),
        (None, PlannedEpoch::Samples(_)) => "in sequence".to_owned(),
        (None, PlannedEpoch::Tokens(_)) => "longest first".to_owned(),
    };
    writeln!(
        out,
        "epoch {}, {order}, from offset {}",
        args.epoch, args.start
    )?;
    let repeated = match plan {
        PlannedEpoch::Samples(_) => "(7) sample 7 again, as padding; ",
        PlannedEpoch::Tokens(_) => "",
    };
    writeln!(out, "{repeated}[7] for an idle rank, does not count")?;
    for rank in 0..plan.world_size() {
        let nothing = if plan.steps(rank) == 0 {
            ": nothing"
        } else {
            ""
        };
        writeln!(out, "\nrank {rank}{nothing}")?;
        for batch in plan.rank(rank) {
            write!(out, "  step {}: ", batch.step)?;
            write_cell(&batch, out)?;
            if let PlannedEpoch::Tokens(tokens) = plan {
                tokens.write_tokens(&batch, out)?;
            }
            writeln!(out)?;
        }
    }
    Ok(())
}

fn write_heading(epoch: &EpochPlan, out: &mut impl Write) -> io::Result<()> {
    let plan = epoch.plan();
    // Rank 0 has the most steps, where ranks differ.
    let (steps, at_most) = match plan.tail() {
        TailPolicy::Uneven => (epoch.steps(0), "at most "),
        _ => (epoch.steps(0), ""),
    };
    let least = plan.share(plan.world_size() - 1);
    let (least, most) = (least.end - least.start, plan.batch_size() as u64);
    let size = if least == most {
        most.to_string()
    } else {
        format!("{least} or {most}")
    };
    writeln!(
        out,
        "samples {}, global batch {} ({} ranks of {size}), steps {at_most}{steps}, tail {}",
        plan.samples(),
        plan.global_batch(),
        plan.world_size(),
        plan.tail(),
    )
}

fn write_cell(batch: &PlannedBatch, out: &mut impl Write) -> io::Result<()> {
    if batch.kind == BatchKind::Idle {
        out.write_all(b"[")?;
        write_joined(&batch.indices, " ", out)?;
        return out.write_all(b"]");
    }
    write_joined(batch.real_indices(), " ", out)?;
    let mut space = if batch.real == 0 { "" } else { " " };
    for index in batch.padding() {
        write!(out, "{space}({index})")?;
        space = " ";
    }
    Ok(())
}

fn write_joined(indices: &[u64], separator: &str, out: &mut impl Write) -> io::Result<()> {
    for (position, index) in indices.iter().enumerate() {
        let separator = if position == 0 { "" } else { separator };
        write!(out, "{separator}{index}")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use serde_json::Value;
    use std::path::Path;

    #[derive(Debug, Parser)]
    struct Command {
        #[command(flatten)]
        args: PlanArgs,
    }

    fn output(line: &str) -> Result<String, String> {
        let words = std::iter::once("plan").chain(line.split_whitespace());
        let args = Command::try_parse_from(words)
            .map_err(|error| error.to_string())?
            .args;
        let mut out = Vec::new();
        write_plan(&args, &mut out).map_err(|error| error.to_string())?;
        Ok(String::from_utf8(out).unwrap())
    }

    fn table(line: &str) -> String {
        output(line).unwrap()
    }

    fn error(line: &str) -> String {
        output(line).unwrap_err()
    }

    #[test]
    fn prints_json() {
        assert_eq!(
            table("--samples 12 --batch-size 3 --world-size 2 --json"),
            "{\"ranks\": [[[0,1,2],[6,7,8]], [[3,4,5],[9,10,11]]]}\n"
        );
        assert_eq!(
            table("--samples 1 --batch-size 3 --world-size 2 --json"),
            "{\"ranks\": [[[0]], []]}\n",
            "an idle rank's batch is nobody's share"
        );
        assert_eq!(
            table("--samples 0 --batch-size 3 --world-size 2 --json"),
            "{\"ranks\": [[], []]}\n"
        );
        assert_eq!(
            table("--samples 12 --batch-size 3 --world-size 1 --start 7 --json"),
            "{\"ranks\": [[[7,8,9],[10,11]]]}\n"
        );
    }

    #[test]
    fn prints_a_table() {
        assert_eq!(
            table("--samples 8 --batch-size 3 --world-size 2 --tail pad"),
            "samples 8, global batch 6 (2 ranks of 3), steps 2, tail pad\n\
             epoch 0, in sequence, from offset 0\n\
             (7) sample 7 again, as padding; [7] for an idle rank, does not count\n\
             \n\
             rank 0\n  step 0: 0 1 2\n  step 1: 6 7 (0)\n\
             \n\
             rank 1\n  step 0: 3 4 5\n  step 1: (1) (2) (3)\n"
        );
        let idle = table("--samples 7 --batch-size 3 --world-size 2");
        assert!(
            idle.ends_with("rank 1\n  step 0: 3 4 5\n  step 1: [3 4 5]\n"),
            "{idle}"
        );
        let none = table("--samples 3 --batch-size 6 --split-batches --world-size 2 --tail uneven");
        assert!(
            none.contains("global batch 6 (2 ranks of 3), steps at most 1"),
            "{none}"
        );
        assert!(
            none.ends_with("rank 0\n  step 0: 0 1 2\n\nrank 1: nothing\n"),
            "{none}"
        );
    }

    #[test]
    fn shuffles_by_seed_and_epoch() {
        let shuffled = |more: &str| {
            let line =
                format!("--samples 60 --batch-size 4 --world-size 2 --json --shuffle {more}");
            let ranks: Value = serde_json::from_str(&table(&line)).unwrap();
            flat(&ranks["ranks"])
        };
        let mut seen = shuffled("1");
        assert_ne!(seen, shuffled("2"));
        assert_ne!(seen, shuffled("1 --epoch 1"));
        assert_eq!(seen, shuffled("1 --epoch 0"));
        seen.sort_unstable();
        assert!(seen.into_iter().eq(0..60));
        let heading =
            table("--samples 6 --batch-size 4 --world-size 2 --shuffle 9 --epoch 3 --start 2");
        assert!(
            heading.contains("epoch 3, shuffled with seed 9, from offset 2"),
            "{heading}"
        );
    }

    #[test]
    fn drop_last_is_the_drop_tail() {
        let line = "--samples 10 --batch-size 3 --world-size 2 --json";
        let dropped = table(&format!("{line} --tail drop"));
        assert_eq!(dropped, "{\"ranks\": [[[0,1,2]], [[3,4,5]]]}\n");
        for more in [
            "",
            "--tail drop",
            "--tail pad",
            "--tail uneven",
            "--iterable",
        ] {
            assert_eq!(
                table(&format!("{line} --drop-last {more}")),
                dropped,
                "{more}"
            );
        }
        let error = error(&format!("{line} --drop-last --tail exact"));
        assert!(
            error.contains("--drop-last") && error.contains("--tail exact"),
            "{error}"
        );
    }

    #[test]
    fn iterable_pads_unless_told_otherwise() {
        let line = "--samples 3 --batch-size 2 --world-size 2 --json";
        let padded = table(&format!("{line} --tail pad"));
        assert_eq!(table(&format!("{line} --iterable")), padded);
        assert_eq!(
            table(&format!("{line} --iterable --tail exact")),
            table(line)
        );
        assert_ne!(table(line), padded);
    }

    #[test]
    fn errors_name_the_option() {
        let check = |line: &str, parts: &[&str]| {
            let error = error(line);
            assert!(
                parts.iter().all(|part| error.contains(part)),
                "{line}: {error}"
            );
        };
        check(
            "--samples 9 --batch-size 0 --world-size 2",
            &["--batch-size 0:", "at least 1"],
        );
        check(
            "--samples 9 --batch-size 2 --world-size 0",
            &["--world-size 0:", "at least 1"],
        );
        check(
            "--samples 9 --batch-size 2 --world-size 2 --start 10",
            &["--start 10:", "at most 9"],
        );
        check(
            "--samples 9 --batch-size 5 --world-size 2 --split-batches --tail pad",
            &["--batch-size 5 --split-batches:", "4 or 6"],
        );
        check(
            "--samples 9 --batch-size 1 --world-size 2 --split-batches",
            &["--batch-size 1 --split-batches:", "at least 2"],
        );
        check(
            "--samples 18446744073709551615 --batch-size 5 --world-size 2",
            &["--samples,", "smaller"],
        );
        check(
            "--samples 9 --batch-size 5 --world-size 2 --tail padded",
            &["'padded'", "uneven"],
        );
        check("--samples 9 --batch-size 5", &["--world-size"]);
        check("--samples -9 --batch-size 5 --world-size 2", &["-9"]);
    }

    #[test]
    fn plans_batches_by_tokens() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lengths");
        std::fs::write(&path, "3\n9\n4\n8\n2\n").unwrap();
        let line = format!("--lengths {} --world-size 2", path.display());
        assert_eq!(
            table(&format!("{line} --max-tokens 18")),
            "samples 5, at most 18 tokens with padding, batches 2 (2 ranks), steps 1, tail exact\n\
             tokens 26, padding 13.3 % (39.5 % with shuffled batches of 3 samples)\n\
             epoch 0, longest first, from offset 0\n\
             [7] for an idle rank, does not count\n\
             \n\
             rank 0\n  step 0: 1 3  (2 × 9 tokens)\n\
             \n\
             rank 1\n  step 0: 2 0 4  (3 × 4 tokens)\n"
        );
        let idle = table(&format!("{line} --max-tokens 12"));
        assert!(
            idle.ends_with("rank 1\n  step 0: 3  (1 × 8 tokens)\n  step 1: [3]\n"),
            "{idle}"
        );
        let dropped = table(&format!("{line} --max-tokens 12 --tail drop --json"));
        assert_eq!(dropped, "{\"ranks\": [[[1]], [[3]]]}\n");
        let packed = table(&format!("{line} --max-tokens 13 --pack"));
        assert!(packed.contains("padding 0.0 %"), "{packed}");
        assert!(packed.contains("step 0: 3 0 4  (13 tokens)"), "{packed}");
        let rest = table(&format!("{line} --max-tokens 18 --start 2 --json"));
        assert_eq!(rest, "{\"ranks\": [[[2,0,4]], []]}\n");
        // The batches of a program with this seed.
        let shuffled: Value = serde_json::from_str(&table(&format!(
            "{line} --max-tokens 9 --shuffle 5 --epoch 3 --json"
        )))
        .unwrap();
        let batches = accelerator_plan::TokenBatches::padded([3, 9, 4, 8, 2], 9).unwrap();
        let batches = batches.shuffled(5, 3);
        for (place, batch) in batches.iter().enumerate() {
            assert_eq!(flat(&shuffled["ranks"][place % 2][place / 2]), *batch);
        }

        let long = error(&format!("{line} --max-tokens 8"));
        assert!(long.contains("--max-tokens 8: sample 1 has 9"), "{long}");
        let middle = error(&format!("{line} --max-tokens 18 --start 1"));
        assert!(middle.contains("--start 1:"), "{middle}");
        let alone = error("--max-tokens 18 --world-size 2");
        assert!(alone.contains("--lengths"), "{alone}");
        assert!(!alone.contains("--samples"), "{alone}");
        let ignored = error("--samples 9 --batch-size 2 --world-size 2 --max-tokens 8");
        assert!(ignored.contains("cannot be used with"), "{ignored}");
        let both = error(&format!("{line} --max-tokens 18 --batch-size 2"));
        assert!(both.contains("cannot be used with"), "{both}");
        for (text, says) in [
            ("3\nlong\n", "line 2 is \"long\""),
            ("3\n\n4", "line 2 is \"\""),
        ] {
            std::fs::write(&path, text).unwrap();
            let word = error(&format!("{line} --max-tokens 18"));
            assert!(word.contains(says), "{word}");
        }
        let huge = u64::MAX;
        std::fs::write(&path, format!("{huge}\n{huge}\n")).unwrap();
        let heading = table(&format!("{line} --max-tokens {huge}"));
        assert!(heading.contains("padding 0.0 %"), "{heading}");
    }

    /// A reader that leaves, as `head` does, or a disk that is full.
    struct Refuses(ErrorKind, usize);

    impl Write for Refuses {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            if self.1 == 0 {
                return Err(self.0.into());
            }
            self.1 = self.1.saturating_sub(bytes.len());
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn ends_quietly_when_nobody_reads_on() {
        for form in ["", "--json"] {
            // As large as that, it ends only because the reader has left.
            let line =
                format!("plan --samples 1000000000000000 --batch-size 1 --world-size 2 {form}");
            let args = Command::try_parse_from(line.split_whitespace())
                .unwrap()
                .args;
            write_plan(&args, &mut Refuses(ErrorKind::BrokenPipe, 100_000)).unwrap();
            let full =
                write_plan(&args, &mut Refuses(ErrorKind::StorageFull, 100_000)).unwrap_err();
            assert!(
                full.to_string().starts_with("cannot write the plan: "),
                "{full}"
            );
        }
    }

    /// Every table that Accelerate's own sharding classes produced, by the options that stand for
    /// its settings. `ACCEL_FIXTURES` names another folder, looked up from the workspace's root.
    #[test]
    fn prints_the_sharding_vectors() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let folder = accelerator_host::variable("ACCEL_FIXTURES");
        let path = match &folder {
            Some(folder) => root.join(folder),
            None => root.join("tests/fixtures"),
        }
        .join("sharding.json");
        let text = std::fs::read_to_string(&path)
            .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let fixtures: Value = serde_json::from_str(&text).unwrap();
        let cases = fixtures["cases"].as_array().unwrap();
        assert!(!cases.is_empty(), "{}: no cases", path.display());
        assert!(
            folder.is_some() || cases.len() >= 826,
            "{}: only {} cases",
            path.display(),
            cases.len()
        );
        for case in cases {
            let is_set = |name: &str| case[name].as_bool().unwrap();
            let mut line = format!(
                "--samples {} --batch-size {} --world-size {} --json",
                case["samples"], case["batch_size"], case["world_size"]
            );
            if is_set("split_batches") {
                line += " --split-batches";
            }
            if is_set("drop_last") {
                line += " --drop-last";
            }
            match case["kind"].as_str().unwrap() {
                "map" => {
                    line += if is_set("even_batches") {
                        " --tail pad"
                    } else {
                        " --tail uneven"
                    };
                    let printed: Value = serde_json::from_str(&table(&line)).unwrap();
                    assert_eq!(printed["ranks"], case["ranks"], "{line}");
                }
                "iterable" => {
                    line += " --iterable";
                    let said = if is_set("drop_last") {
                        line.clone()
                    } else {
                        format!("{line} --tail pad")
                    };
                    assert_eq!(table(&line), table(&said), "{line}");
                    let printed: Value = serde_json::from_str(&table(&said)).unwrap();
                    let printed: Vec<_> = printed["ranks"]
                        .as_array()
                        .unwrap()
                        .iter()
                        .map(flat)
                        .collect();
                    let expected: Vec<Vec<u64>> =
                        serde_json::from_value(case["ranks"].clone()).unwrap();
                    assert_eq!(printed, expected, "{said}");
                }
                kind => panic!("{}: a case of kind {kind:?}", path.display()),
            }
        }
        // Past the test harness, which swallows what a passing test prints.
        let _ = writeln!(
            std::io::stderr(),
            "checked {} sharding cases of {}",
            cases.len(),
            path.display()
        );
    }

    /// All numbers of nested lists, in order.
    fn flat(value: &Value) -> Vec<u64> {
        match value {
            Value::Array(items) => items.iter().flat_map(flat).collect(),
            _ => vec![value.as_u64().unwrap()],
        }
    }
}
