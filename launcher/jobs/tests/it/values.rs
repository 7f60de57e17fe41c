//! A program's arguments and variables arrive byte for byte, whatever an engine and its shells do with them.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::slurm::Commands;
use crate::support::{JOBS, Jobs, launcher};

const VALUES: [&str; 39] = [
    "",
    " ",
    " a  b ",
    "$",
    "$$",
    "$$$",
    "$A",
    "${A}",
    "${NOT_SET}",
    "$(A)",
    "$$(A)",
    "$HOME",
    "%j",
    "%%",
    "it's",
    "''",
    "\"quoted\"",
    "`id`",
    "\\",
    "\\n",
    "\\$A",
    "a\nb\r\n\tc\n",
    "\u{1}\u{7f}",
    "é ∞ 𝄞",
    "\u{85}\u{a0}\u{2028}",
    "-n",
    "--",
    "*",
    "~",
    "!!",
    "{a,b}",
    "#x",
    "null",
    "yes",
    "0x1f",
    "1e3",
    "- a: b",
    "SCRIPT",
    "&amp;<>|;",
];

/// Names that shells or scripts on the way may use themselves.
const NAMES: [&str; 8] = [
    "folder", "nodes", "code", "restarts", "file", "copy", "agents", "job",
];

/// A job whose program writes its arguments and variables.
struct Dump {
    jobs: Jobs,
    program: PathBuf,
    output: PathBuf,
    words: Vec<String>,
    variables: Vec<(String, String)>,
}

impl Dump {
    fn new() -> Self {
        launcher();
        let jobs = Jobs::new();
        let long = "x".repeat(100_000);
        let words: Vec<_> = VALUES.map(str::to_owned).into();
        let mut variables: Vec<_> = VALUES
            .iter()
            .enumerate()
            .map(|(at, value)| (format!("V{at}"), (*value).to_owned()))
            .collect();
        variables.extend(NAMES.map(|name| (name.to_owned(), format!("the {name}"))));
        variables.push(("A".to_owned(), "replaced".to_owned()));
        variables.push(("LONG".to_owned(), long));
        let (program, output) = (jobs.folder().join("_dump"), jobs.folder().join("_output"));
        let names: Vec<_> = variables.iter().map(|(name, _)| name.as_str()).collect();
        let script = format!(
            "#!/bin/bash\n[ -z \"${{ACCEL_JOBS_ENV+set}}\" ] || exit 9\n{{ printf '%s\\0' \"$@\"; for name in {}; do printf '%s\\0' \"$name=${{!name-not set}}\"; done; }} >{}\n",
            names.join(" "),
            output.display()
        );
        fs::write(&program, script).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        Self {
            jobs,
            program,
            output,
            words,
            variables,
        }
    }

    /// Returns the command line that submits it to an engine.
    fn submit(&self, options: &str) -> Vec<String> {
        let line = format!("submit --name a {options}");
        let mut line: Vec<_> = line.split_whitespace().map(str::to_owned).collect();
        let variables = self.variables.iter();
        line.extend(variables.map(|(name, value)| format!("--env={name}={value}")));
        line.extend(["--".to_owned(), self.program.display().to_string()]);
        line.extend(self.words.iter().cloned());
        line
    }

    fn run(&self, options: &str, variables: &[(&str, &str)]) -> String {
        let line = self.submit(options);
        let line: Vec<_> = line.iter().map(String::as_str).collect();
        let mut command = Command::new(JOBS);
        command.envs(variables.iter().copied());
        self.jobs.run_by(&mut command, &line).ok()
    }

    /// Compares the output of the program with the given values.
    fn check(&self) {
        let written = fs::read(&self.output).unwrap();
        let written: Vec<_> = written.split(|byte| *byte == 0).collect();
        let variables = self.variables.iter();
        let variables = variables.map(|(name, value)| format!("{name}={value}"));
        let given: Vec<_> = self.words.iter().cloned().chain(variables).collect();
        for (written, given) in written.iter().zip(&given) {
            assert!(
                *written == given.as_bytes(),
                "{given:?} arrives as {:?}",
                String::from_utf8_lossy(written)
            );
        }
        assert_eq!(written.len(), given.len() + 1);
    }
}

#[test]
fn locally() {
    let dump = Dump::new();
    dump.run("", &[]);
    dump.jobs.ok("wait a");
    dump.check();
}

/// The test runs the script as Slurm does.
#[test]
fn by_the_script_of_slurm() {
    let dump = Dump::new();
    let script = dump.jobs.folder().join("_script");
    let sbatch = format!("cat >{}; echo 7", script.display());
    // This runs the task here.
    let srun = "while [ \"${1#--}\" != \"$1\" ]; do shift; done\nSLURM_NODEID=0 exec \"$@\"";
    let commands = Commands::new(&[("sbatch", &sbatch), ("scontrol", "echo n1"), ("srun", srun)]);
    let path = commands.path();
    dump.run("--engine slurm", &[("PATH", &path)]);
    let done = Command::new("bash")
        .arg(&script)
        .env("PATH", path)
        .env("SLURM_JOB_ID", "7")
        .env("SLURM_JOB_NODELIST", "n1")
        .env("SLURM_SUBMIT_DIR", dump.jobs.folder())
        .output()
        .unwrap();
    assert!(done.status.success(), "{done:?}");
    dump.check();
}

/// Expands a word of a command, or a value, like a kubelet: `$$` becomes `$`, and `$(NAME)` is replaced if there is
/// such a variable.
fn expanded(text: &str, variables: &[(String, String)]) -> String {
    let mut expanded = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('$') {
        expanded.push_str(before);
        rest = after;
        let name = after
            .strip_prefix('(')
            .and_then(|name| name.split_once(')'));
        if let Some(after) = after.strip_prefix('$') {
            expanded.push('$');
            rest = after;
        } else if let Some((name, after)) = name {
            let found = variables.iter().find(|(of, _)| of == name);
            match found {
                Some((_, value)) => expanded.push_str(value),
                None => expanded.push_str(&format!("$({name})")),
            }
            rest = after;
        } else {
            expanded.push('$');
        }
    }
    expanded + rest
}

/// The test reads the printed objects back, and expands them like a kubelet.
#[test]
fn by_the_pods_of_kubernetes() {
    assert_eq!(
        expanded("$(A)$$(A)$B$", &[("A".into(), "a".into())]),
        "a$(A)$B$"
    );
    for kind in ["job", "pytorchjob", "trainjob"] {
        let dump = Dump::new();
        let kubeconfig = dump.jobs.folder().join("_kubeconfig");
        let nobody = r#"{"apiVersion": "v1", "kind": "Config", "current-context": "x", "users": [{"name": "u", "user": {}}],
            "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}]}"#;
        fs::write(&kubeconfig, nobody).unwrap();
        let options = format!("--engine kubernetes --kind {kind} --image x --dry-run");
        let yaml = dump.run(&options, &[("KUBECONFIG", kubeconfig.to_str().unwrap())]);
        let first = yaml.split("\n---\n").next().unwrap();
        let object: Value = serde_saphyr::from_str(first).unwrap();
        let container = match kind {
            "job" => &object["spec"]["template"]["spec"]["containers"][0],
            "pytorchjob" => {
                &object["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"]
                    [0]
            }
            _ => &object["spec"]["trainer"],
        };
        let mut variables: Vec<(String, String)> = Vec::new();
        for variable in container["env"].as_array().unwrap() {
            let [name, value] = ["name", "value"].map(|key| variable[key].as_str().unwrap());
            let value = expanded(value, &variables);
            variables.push((name.to_owned(), value));
        }
        let words = container["command"].as_array().unwrap();
        let words = words
            .iter()
            .map(|word| expanded(word.as_str().unwrap(), &variables));
        let words: Vec<_> = words.collect();
        let program_at = words.iter().position(|word| word == "--").unwrap() + 1;
        assert_eq!(words[program_at], dump.program.to_str().unwrap());
        let done = Command::new(&words[program_at])
            .args(&words[program_at + 1..])
            .envs(variables)
            .status();
        assert!(done.unwrap().success());
        dump.check();
    }
}

/// Stand-ins for Ray's modules, with actors in the driver's own process, and with Ray's expansion of variables of a
/// runtime environment.
const RAY: &str = r#"
import importlib.util, json, os, re, sys, types
variables = json.loads(os.environ.pop("ENV_VARS"))
def update_variables():
    for name, value in variables.items():
        os.environ[name] = re.sub(r"\$\{[A-Z0-9_]+\}", "", os.path.expandvars(value))
update_variables()
class Ref:
    def __init__(self, value): self.value = value
class Call:
    def __init__(self, method): self.method = method
    def remote(self, *words): return Ref(self.method(*words))
class Actor:
    def __init__(self, of): self.of = of
    def __getattr__(self, name): return Call(getattr(self.of, name))
class Remote:
    def __init__(self, of): self.of = of
    def options(self, **_): return self
    def remote(self):
        update_variables()
        return Actor(self.of())
def module(name, **values):
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(values)
    return sys.modules[name]
nothing = lambda *_, **__: None
util = module("ray.util", get_node_ip_address=lambda: "127.0.0.1")
lost = type("RayActorError", (Exception,), {})
module("ray", util=util, remote=Remote, get=lambda ref: ref.value, kill=nothing, init=nothing,
       wait=lambda refs, **_: (list(refs), []),
       exceptions=types.SimpleNamespace(RayActorError=lost, RayTaskError=type("RayTaskError", (Exception,), {})),
       get_runtime_context=lambda: types.SimpleNamespace(get_job_id=lambda: "01"))
module("ray.util.placement_group", placement_group=nothing, placement_group_table=nothing, remove_placement_group=nothing)
module("ray.util.scheduling_strategies", PlacementGroupSchedulingStrategy=nothing)
spec = importlib.util.spec_from_file_location("gang", os.environ.pop("GANG"))
gang = importlib.util.module_from_spec(spec)
spec.loader.exec_module(gang)
gang.main()
"#;

/// The test runs the entrypoint as Ray does, with the driver and stand-ins for Ray's modules.
#[test]
fn by_the_driver_of_ray() {
    match Command::new("python3").arg("--version").output() {
        Ok(python) if python.status.success() => {}
        _ => return println!("skipped, since there is no python3"),
    }
    let dump = Dump::new();
    let text = dump.run("--engine ray --no-upload --dry-run", &[]);
    let (_, request) = text.split_once("/api/jobs/\n").unwrap();
    let request: Value = serde_json::from_str(request).unwrap();
    // Every user of the driver's host can read the entrypoint.
    let entrypoint = request["entrypoint"].as_str().unwrap();
    for (name, value) in &dump.variables {
        let is_word = dump.words.contains(value);
        assert!(is_word || !entrypoint.contains(value.as_str()), "{name}");
    }
    let folder = dump.jobs.folder();
    fs::write(folder.join("_ray.py"), RAY).unwrap();
    let python = format!(
        "shift; exec python3 {} \"$@\"",
        folder.join("_ray.py").display()
    );
    let commands = Commands::new(&[("python", &python)]);
    let log = fs::File::create(folder.join("_log")).unwrap();
    let done = Command::new("sh")
        .args(["-c", entrypoint])
        .env("PATH", commands.path())
        .env("ENV_VARS", request["runtime_env"]["env_vars"].to_string())
        .env(
            "GANG",
            Path::new(env!("CARGO_MANIFEST_DIR")).join("src/engine/ray/gang.py"),
        )
        .env("A", "replaced")
        .current_dir(folder)
        .stdout(log)
        .stderr(Stdio::inherit())
        .status()
        .unwrap();
    let log = fs::read_to_string(folder.join("_log")).unwrap();
    assert!(done.success(), "{log}");
    dump.check();
}
