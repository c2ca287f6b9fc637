//! The plain dump of a database of more than a gigabyte, with many kinds of objects, is identical after a restore.

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use anyhow::{Context, Result, ensure};
use sha2::{Digest, Sha256};

use super::machine::{self, Machine};

const MIN_DATABASE_BYTES: i64 = 1_000_000_000;

/// Creates 25 apps with 12 tables and a role each, and many other kinds of objects.
const CREATE_APPS: &str = r#"
DO $$
DECLARE app text; t int;
BEGIN
  FOR a IN 1..25 LOOP
    app := 'app_a' || a;
    EXECUTE format('CREATE ROLE %I LOGIN PASSWORD %L', app, md5(app));
    EXECUTE format('CREATE SCHEMA %I AUTHORIZATION %I', app, app);
    FOR t IN 1..12 LOOP
      EXECUTE format('CREATE TABLE %I.%I (id uuid PRIMARY KEY DEFAULT gen_random_uuid(), n bigserial, body jsonb, raw bytea,
                      size int GENERATED ALWAYS AS (octet_length(raw)) STORED, at timestamptz DEFAULT now())', app, 't' || t);
      EXECUTE format('ALTER TABLE %I.%I OWNER TO %I', app, 't' || t, app);
      EXECUTE format('INSERT INTO %I.%I (body, raw) SELECT jsonb_build_object(''n'', n, ''of'', %L), sha256(n::text::bytea)
                      FROM generate_series(1, 500) n', app, 't' || t, app || t);
      EXECUTE format('CREATE INDEX ON %I.%I USING gin (body)', app, 't' || t);
    END LOOP;
  END LOOP;
END $$;
CREATE FUNCTION public.touched() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN NEW.at := now(); RETURN NEW; END $$;
CREATE TRIGGER touched BEFORE UPDATE ON app_a1.t1 FOR EACH ROW EXECUTE FUNCTION public.touched();
CREATE TYPE public.mood AS ENUM ('good', 'bad'); CREATE DOMAIN public.small AS int CHECK (VALUE < 100);
CREATE TABLE public.parts (at date NOT NULL, m public.mood, s public.small, what text) PARTITION BY RANGE (at);
CREATE TABLE public.parts_2025 PARTITION OF public.parts FOR VALUES FROM ('2025-01-01') TO ('2026-01-01');
CREATE TABLE public.parts_2026 PARTITION OF public.parts FOR VALUES FROM ('2026-01-01') TO ('2027-01-01') PARTITION BY LIST (m);
CREATE TABLE public.parts_2026_good PARTITION OF public.parts_2026 FOR VALUES IN ('good');
CREATE TABLE public.parts_2026_rest PARTITION OF public.parts_2026 DEFAULT;
INSERT INTO public.parts SELECT '2025-01-01'::date + n % 700, (ARRAY['good', 'bad']::public.mood[])[1 + n % 2], n % 100, repeat('p', n % 200)
  FROM generate_series(1, 200000) n;
CREATE MATERIALIZED VIEW public.sums AS SELECT m, count(*) FROM public.parts GROUP BY m;
CREATE TABLE public.latin (e text COLLATE "C", i inet, r int4range, a text[], p point);
INSERT INTO public.latin VALUES (E'tab\t nl\n bs\\ ü', '10.0.0.1/8', '[1,5)', ARRAY['a', NULL, '{}'], '(1,2)'); INSERT INTO public.latin DEFAULT VALUES;
CREATE SEQUENCE public.alone INCREMENT 7; SELECT nextval('public.alone'), nextval('public.alone');
SELECT lo_from_bytea(0, decode(repeat(md5(n::text), 4000), 'hex')) FROM generate_series(1, 200) n;
GRANT SELECT ON public.parts TO app_a2; ALTER DEFAULT PRIVILEGES IN SCHEMA public GRANT SELECT ON TABLES TO app_a3;
COMMENT ON TABLE public.parts IS 'by year';
"#;
const CREATE_BULK_TABLE: &str = "CREATE TABLE public.bulk AS SELECT n, md5(n::text) || md5((n * 7)::text) AS noise, repeat(md5(n::text), 12) AS more \
     FROM generate_series(1, 2000000) n; ALTER TABLE public.bulk ADD PRIMARY KEY (n)";

/// Returns the size and hash of a plain dump, without the `\restrict` lines, whose key is random.
fn hash_plain_dump(machine: &Machine) -> Result<String> {
    let mut dump = machine.postgres().binaries().client_command("pg_dump");
    let mut dump = dump.arg(machine.postgres().url("svc")).stdout(Stdio::piped()).spawn()?;
    let (mut digest, mut bytes, mut line) = (Sha256::new(), 0, Vec::new());
    let mut reader =
        BufReader::with_capacity(1 << 18, dump.stdout.take().context("pg_dump has no standard output")?);
    while reader.read_until(b'\n', &mut line)? > 0 {
        if !line.starts_with(b"\\restrict") && !line.starts_with(b"\\unrestrict") {
            digest.update(&line);
            bytes += line.len();
        }
        line.clear();
    }
    ensure!(dump.wait()?.success(), "pg_dump failed");
    Ok(format!("{bytes} bytes, {}", hex::encode(digest.finalize())))
}

#[tokio::test]
#[ignore = "long: backs up and restores a gigabyte"]
async fn gigabyte_database_is_restored_identically() -> Result<()> {
    let store = machine::start_store()?;
    let old = Machine::in_use(&store, 1).await?;
    for sql in [CREATE_APPS, CREATE_BULK_TABLE] {
        old.client().await?.batch_execute(sql).await?;
    }
    let size = old.client().await?.query_one("SELECT pg_database_size('svc')", &[]).await?.get::<_, i64>(0);
    assert!(size > MIN_DATABASE_BYTES, "{size} bytes");
    old.run(&["svc-db-backup"])?.expect(0);
    let new = Machine::new(&store, 2).await?;
    new.run(&["svc-restore"])?.expect(0);
    let expected = hash_plain_dump(&old)?;
    assert_eq!(hash_plain_dump(&new)?, expected);
    println!("database: {size} bytes; plain dump: {expected}");
    Ok(())
}
