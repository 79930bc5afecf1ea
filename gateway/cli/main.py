"""The `terazi` command: the server's own commands. `gateway.cli.admin` and `gateway.cli.reports` have the others.

A command imports heavy modules only when it runs, so that `terazi --help` stays fast.
"""

import os
import sys
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from gateway import standard_files
from gateway.cli import admin as cli_admin
from gateway.cli import reports as cli_reports
from gateway.cli.options import DataDir, Json
from gateway.command import (
    EXIT_ERROR,
    EXIT_USAGE,
    CommandError,
    error_document,
    output_failure,
    print_json,
    print_record,
    print_table,
    reporting,
)

app = typer.Typer(
    name="terazi",
    help="A fairness gateway for shared GPUs: OpenAI routes, team keys, fair shares at every decode step.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
config_app = typer.Typer(help="The server's settings.", no_args_is_help=True)
db_app = typer.Typer(help="The database.", no_args_is_help=True)
model_app = typer.Typer(help="The model.", no_args_is_help=True)
app.add_typer(cli_admin.team_app, name="team")
app.add_typer(cli_admin.key_app, name="key")
app.add_typer(cli_admin.tier_app, name="tier")
app.add_typer(cli_admin.quota_app, name="quota")
app.add_typer(cli_reports.usage_app, name="usage")
app.add_typer(cli_reports.fairness_app, name="fairness")
app.add_typer(config_app, name="config")
app.add_typer(db_app, name="db")
app.add_typer(model_app, name="model")


def _print_version(is_asked: bool) -> None:
    if is_asked:
        version()
        raise typer.Exit


@app.callback()
def _root(
    is_asked: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="This version of Terazi.")
    ] = False,
) -> None:
    del is_asked


Text = str | None
ConfigFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="YAML: server, store, engine, logging.")
]
Host = Annotated[
    Text, typer.Option("--host", metavar="ADDRESS", help="Address of the OpenAI routes; :: is every address.")
]
Port = Annotated[Text, typer.Option("--port", metavar="N", help="Port of the OpenAI routes; 0 takes a free one.")]
AdminPort = Annotated[Text, typer.Option("--admin-port", metavar="N", help="Port of the admin listener.")]
Model = Annotated[Text, typer.Option("--model", metavar="NAME|PATH", help="A built-in name or a model directory.")]
Policy = Annotated[Text, typer.Option("--policy", metavar="eg-mlfq|fcfs", help="Order of requests.")]
Engine = Annotated[Text, typer.Option("--engine", metavar="torch|sim", help="The real engine, or the simulated one.")]
BatchSize = Annotated[Text, typer.Option("--max-batch-size", metavar="N", help="Sequences in one step.")]
BatchTokens = Annotated[Text, typer.Option("--max-batch-tokens", metavar="N", help="Tokens in one step.")]
KvMemory = Annotated[Text, typer.Option("--kv-memory", metavar="SIZE", help="Device memory for the KV cache: 2GiB.")]
HostKvMemory = Annotated[Text, typer.Option("--host-kv-memory", metavar="SIZE", help="Host memory for swapped KV.")]
DrainTimeout = Annotated[Text, typer.Option("--drain-timeout", metavar="TIME", help="How long SIGTERM waits: 60s.")]
EngineSocket = Annotated[
    Text, typer.Option("--engine-socket", metavar="PATH", help="Use the engine that listens there.")
]
StoreUrl = Annotated[Text, typer.Option("--store-url", metavar="URL", help="SQLAlchemy URL; empty is SQLite.")]


def _settings(config: Path | None, **flags: Any) -> Any:
    from gateway.settings.values import load

    return load(flags, os.environ, config)


@app.command()
def serve(
    data_dir: DataDir = None,
    host: Host = None,
    port: Port = None,
    admin_port: AdminPort = None,
    config: ConfigFile = None,
    model: Model = None,
    policy: Policy = None,
    max_batch_size: BatchSize = None,
    max_batch_tokens: BatchTokens = None,
    kv_memory: KvMemory = None,
    host_kv_memory: HostKvMemory = None,
    engine: Engine = None,
    engine_socket: EngineSocket = None,
    drain_timeout: DrainTimeout = None,
    store_url: StoreUrl = None,
    quickstart: Annotated[bool, typer.Option("--quickstart", help="Make team demo and print a curl line.")] = False,
    as_json: Json = False,
) -> None:
    """Serve the OpenAI routes, with an engine of its own or that of --engine-socket. Ends with 0 after SIGTERM."""
    with reporting(as_json):
        settings = _settings(
            config,
            data_dir=data_dir,
            host=host,
            port=port,
            admin_port=admin_port,
            model=model,
            policy=policy,
            max_batch_size=max_batch_size,
            max_batch_tokens=max_batch_tokens,
            kv_memory=kv_memory,
            host_kv_memory=host_kv_memory,
            engine=engine,
            engine_socket=str(Path(engine_socket).absolute()) if engine_socket else None,
            drain_timeout=drain_timeout,
            store_url=store_url,
        )
        from gateway.serve import run

        run(settings, quickstart=quickstart, as_json=as_json)


@app.command("engine")
def engine_command(
    listen: Annotated[Path, typer.Option("--listen", metavar="PATH", help="Unix socket to listen on.")],
    data_dir: DataDir = None,
    config: ConfigFile = None,
    model: Model = None,
    policy: Policy = None,
    max_batch_size: BatchSize = None,
    max_batch_tokens: BatchTokens = None,
    kv_memory: KvMemory = None,
    host_kv_memory: HostKvMemory = None,
    engine: Engine = None,
    as_json: Json = False,
) -> None:
    """Run an engine by itself. It outlives the gateways that connect to it, and ignores SIGINT and SIGTERM."""
    with reporting(as_json):
        settings = _settings(
            config,
            data_dir=data_dir,
            model=model,
            policy=policy,
            max_batch_size=max_batch_size,
            max_batch_tokens=max_batch_tokens,
            kv_memory=kv_memory,
            host_kv_memory=host_kv_memory,
            engine=engine,
        )
        import msgspec

        from gateway.link.process import COMMAND, engine_config

        document = msgspec.json.encode(engine_config(settings)).decode()
        os.execv(sys.executable, [*COMMAND, "--socket", str(listen.absolute()), "--config", document])


@app.command()
def demo(
    seconds: Annotated[
        float, typer.Option("--seconds", metavar="N", min=1, help="Play only this much of the trace.")
    ] = 60.0,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the report goes.")] = Path("demo-out"),
    trace: Annotated[Path | None, typer.Option("--trace", metavar="FILE", help="Another trace.")] = None,
    engine: Engine = None,
    model: Model = None,
    max_batch_size: BatchSize = None,
    kv_memory: KvMemory = None,
    host_kv_memory: HostKvMemory = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Play a trace of several teams under FCFS and under EG-MLFQ, and write a fairness report of the latter."""
    with reporting(as_json):
        from gateway.demo.run import KV_MEMORY, run_demo

        run_demo(
            out=out,
            seconds=seconds,
            trace=trace,
            engine=engine or "torch",
            model=model or "smollm2-135m",
            max_batch_size=max_batch_size or "16",
            kv_memory=kv_memory or KV_MEMORY,
            host_kv_memory=host_kv_memory or "1GiB",
            data_dir=data_dir,
            as_json=as_json,
        )


@app.command()
def simulate(
    trace: Annotated[
        Path, typer.Option("--trace", metavar="FILE", help="JSON lines: t, team, prompt_tokens, output_tokens.")
    ],
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy", metavar="eg-mlfq|fcfs", help="Order of requests; give it again to compare. Default: both."
        ),
    ] = None,
    tier: Annotated[
        list[str] | None,
        typer.Option("--tier", metavar="TEAM=TIER", help="A team's tier, once for each team. Default: silver."),
    ] = None,
    max_batch_size: BatchSize = None,
    max_batch_tokens: BatchTokens = None,
    kv_memory: KvMemory = None,
    host_kv_memory: HostKvMemory = None,
    memory_preemption: Annotated[
        str | None,
        typer.Option(
            "--memory-preemption",
            metavar="proactive|reactive|recompute|none",
            help="How KV is taken from paused requests. Default: proactive.",
        ),
    ] = None,
    coast: Annotated[
        bool | None,
        typer.Option(
            "--coast/--no-coast",
            help="Serve a team of like requests in order of arrival. Default: TERAZI_COAST, or yes.",
        ),
    ] = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Play a trace through the production scheduler on a virtual clock. Same inputs, same bytes out."""
    with reporting(as_json):
        del data_dir  # every command has this option, but `simulate` touches no store
        policies = policy or ["eg-mlfq", "fcfs"]
        limits = {
            "max_batch_size": max_batch_size,
            "max_batch_tokens": max_batch_tokens,
            "kv_memory": kv_memory,
            "host_kv_memory": host_kv_memory,
            "memory_preemption": memory_preemption,
            "coast": None if coast is None else str(coast).lower(),
        }
        cli_reports.simulate(trace, policies, tier or [], limits, as_json)


@config_app.command("show")
def config_show(config: ConfigFile = None, data_dir: DataDir = None, as_json: Json = False) -> None:
    """Every setting with value and source: of the running server; without one, or with --config, of a next start."""
    with reporting(as_json):
        from gateway.admin.client import call, running_server
        from gateway.settings.values import as_rows, setting, shown

        settings = _settings(config, data_dir=data_dir)
        server = None if config else running_server(settings.data_dir)
        answer = call(settings.data_dir, "GET", "/admin/v1/settings") if server else {"settings": as_rows(settings)}
        rows = answer["settings"] or as_rows(settings)  # empty when the server has ended meanwhile
        if as_json:
            print_json({"settings": rows, "server": server})
        else:
            texts = [row | {"value": shown(setting(row["name"]), row["value"])} for row in rows]
            title = f"settings of the running server, process {server['pid']}" if server else ""
            print_table(texts, ["name", "value", "source"], title)


@db_app.command("upgrade")
def db_upgrade(data_dir: DataDir = None, store_url: StoreUrl = None, as_json: Json = False) -> None:
    """Bring the database to this version's schema. Refused (exit 6) while a server runs."""
    with reporting(as_json):
        from gateway.lock import DataDirLock
        from gateway.store import upgrade_database

        settings = _settings(None, data_dir=data_dir, store_url=store_url)
        with DataDirLock(settings.data_dir):
            upgrade_database(settings)
        if as_json:
            print_json({"upgraded": True, "data_dir": str(settings.data_dir)})
        else:
            print(f"database of {settings.data_dir} is up to date")


@model_app.command("show")
def model_show(model: Model = None, data_dir: DataDir = None, as_json: Json = False) -> None:
    """Name, directory and SHA-256 of the model. It is converted into the cache if it is not there yet."""
    with reporting(as_json):
        from engine.models.store import ModelStoreError, prepare

        settings = _settings(None, data_dir=data_dir, model=model)
        try:
            stored = prepare(settings.model, settings.cache_dir)
        except ModelStoreError as error:
            raise CommandError(str(error), code="model_unusable") from None
        record = {"name": stored.name, "path": str(stored.path), "sha256": stored.sha256}
        print_json(record) if as_json else print_record(record)


@app.command()
def version(data_dir: DataDir = None, as_json: Json = False) -> None:
    """This version of Terazi."""
    from importlib.metadata import version as installed_version

    del data_dir
    number = installed_version("terazi")
    print_json({"version": number}) if as_json else print(f"terazi {number}")


def main() -> None:
    """Entry point of the `terazi` command."""
    standard_files.hold()
    code: Any
    try:
        code = _run(sys.argv[1:])
    except SystemExit as end:
        # When the reader has left (`terazi --help | head`), Typer ends with 1. That is no error.
        code = 0 if isinstance(end.__context__, BrokenPipeError) else end.code
    except OSError as error:
        standard_files.give_up(sys.stdout)
        code = 0 if standard_files.nobody_reads(error) else _unwritable(error)
    failure = standard_files.finish()
    if failure is not None and not code:
        code = _unwritable(failure)
    raise SystemExit(code)


def _unwritable(error: OSError) -> int:
    text = f"{error.filename}: {error.strerror or error}" if error.filename else output_failure(error)
    print(f"terazi: {text}", file=sys.stderr)
    return EXIT_ERROR


def _run(arguments: list[str]) -> Any:
    """Run one command. Returns its exit code, or None for 0."""
    as_json = "--json" in arguments or "--format=json" in arguments or ("--format", "json") in pairwise(arguments)
    try:
        for argument in arguments:
            argument.encode()
        return app(arguments, standalone_mode=False)
    except UnicodeEncodeError:
        if as_json:
            print_json(error_document("usage", "an argument is not UTF-8 text"))
        print("terazi: an argument is not UTF-8 text", file=sys.stderr)
        return EXIT_USAGE
    except typer.TyperException as error:
        from tenants.store_url import scrubbed

        usage = cast(typer.BadParameter, error)  # all of them are usage errors, whose base class has no public name
        usage.message = scrubbed(usage.message)  # the text repeats an argument, which may be a misplaced store URL
        if as_json:
            print_json(error_document("usage", usage.format_message()))
        usage.show()
        return usage.exit_code
    except KeyboardInterrupt:
        return 130
