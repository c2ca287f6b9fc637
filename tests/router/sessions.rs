//! The platform's own sessions: opened after the provider's token, handed to the code host, revoked, per slot.

use std::time::{Duration, Instant};

use anyhow::Result;
use http::StatusCode;

use super::machine::TestMachine;
use super::world::{APP, Answer, CODE, OBEYED_WITHIN, World, read};

/// A browser opens a page with the provider's cookie and keeps the session that it gets.
async fn session(world: &World, host: &str, user: &str) -> String {
    let cookie = format!("__session={}", world.token(user));
    let answer = read(world.get(host, "/").header("accept", "text/html").header("cookie", cookie)).await;
    let name = if host == APP { "svc_session" } else { "svc_code_session" };
    let value = answer.cookie(name).unwrap_or_else(|| panic!("no session in {answer:?}"));
    format!("{name}={value}")
}

async fn with_cookie(world: &World, host: &str, path: &str, cookie: &str) -> Answer {
    read(world.get(host, path).header("cookie", cookie)).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_page_opens_a_session_that_outlives_the_token() -> Result<()> {
    let (world, machine) = World::with_machine("user_1").await?;
    let cookie = format!("__session={}", world.token("user_1"));
    let page = read(world.get(APP, "/").header("accept", "text/html").header("cookie", &cookie)).await;
    let line = page.headers["set-cookie"].to_str()?;
    for part in ["svc_session=", "HttpOnly", "Secure", "SameSite=Lax", "Path=/", "Max-Age=43200"] {
        assert!(line.contains(part), "{line}");
    }
    let program = read(world.get(APP, "/").header("cookie", &cookie)).await;
    assert_eq!(program.cookie("svc_session"), None, "a program asked for no session");
    let own = format!("svc_session={}", page.cookie("svc_session").unwrap());
    assert_eq!(with_cookie(&world, APP, "/", &own).await.status, StatusCode::OK);
    assert_eq!(world.proven(&machine, &machine.last().headers).sub.as_str(), "user_1");
    // Only a hash is kept.
    let row = world.sql.query_one("SELECT token_hash FROM sessions", &[]).await?;
    assert!(!String::from_utf8_lossy(row.get::<_, &[u8]>(0)).contains(&own[12..]));
    // The other host's cookie is another one.
    for wrong in [own.replace("svc_session", "svc_code_session"), own.clone()] {
        assert_eq!(with_cookie(&world, CODE, "/", &wrong).await.status, StatusCode::UNAUTHORIZED);
    }
    for wrong in ["svc_session=", "svc_session=x", &format!("svc_session={}", "A".repeat(43))] {
        assert_eq!(with_cookie(&world, APP, "/", wrong).await.status, StatusCode::UNAUTHORIZED);
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_revocation_elsewhere_is_obeyed() -> Result<()> {
    let (world, _machine) = World::with_machine("user_1").await?;
    let cookie = session(&world, APP, "user_1").await;
    assert_eq!(with_cookie(&world, APP, "/", &cookie).await.status, StatusCode::OK);
    world.sql.batch_execute("UPDATE sessions SET revoked_at = now()").await?;
    let began = Instant::now();
    while with_cookie(&world, APP, "/", &cookie).await.status != StatusCode::UNAUTHORIZED {
        assert!(began.elapsed() < OBEYED_WITHIN);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn signing_out_ends_all_of_the_users_sessions() -> Result<()> {
    let (world, _machine) = World::with_machine("user_1").await?;
    let (one, two) = (session(&world, APP, "user_1").await, session(&world, CODE, "user_1").await);
    let other = session(&world, APP, "user_2").await;
    let answer = read(world.post(APP, "/_svc/sign-out").header("cookie", &one)).await;
    assert_eq!((answer.status, answer.cookie("svc_session").as_deref()), (StatusCode::NO_CONTENT, Some("")));
    assert_eq!(with_cookie(&world, APP, "/", &one).await.status, StatusCode::UNAUTHORIZED);
    assert_eq!(with_cookie(&world, CODE, "/", &two).await.status, StatusCode::UNAUTHORIZED);
    assert_eq!(
        with_cookie(&world, APP, "/", &other).await.status,
        StatusCode::SERVICE_UNAVAILABLE,
        "no machine"
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_expired_session_is_none() -> Result<()> {
    let (world, _machine) = World::with_machine("user_1").await?;
    let cookie = session(&world, APP, "user_1").await;
    world.sql.batch_execute("UPDATE sessions SET expires_at = now()").await?;
    let began = Instant::now();
    while with_cookie(&world, APP, "/", &cookie).await.status != StatusCode::UNAUTHORIZED {
        assert!(began.elapsed() < OBEYED_WITHIN);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn another_user_who_signs_in_takes_over_the_browser() -> Result<()> {
    let (world, machine) = World::with_machine("user_1").await?;
    let cookie = session(&world, APP, "user_1").await;
    let both = format!("{cookie}; __session={}", world.token("user_2"));
    let seen = machine.arrivals().len();
    assert_eq!(with_cookie(&world, APP, "/", &both).await.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(machine.arrivals().len(), seen);
    Ok(())
}

/// The path and query of a redirect to one of our hosts.
fn to_host<'a>(answer: &'a Answer, host: &str) -> &'a str {
    let prefix = format!("http://{host}");
    answer.location().strip_prefix(&prefix).unwrap_or_else(|| panic!("not to {host}: {answer:?}"))
}

#[tokio::test(flavor = "multi_thread")]
async fn the_code_host_gets_its_session_by_a_code_that_works_once_and_there_alone() -> Result<()> {
    let (world, machine) = World::with_machine("user_1").await?;
    let app = session(&world, APP, "user_1").await;
    let page = |host, path: &str, cookie: &str| {
        world.get(host, path).header("accept", "text/html").header("cookie", cookie.to_owned())
    };
    let asked = read(page(CODE, "/?folder=/home", "")).await;
    let state = format!("svc_code_state={}", asked.cookie("svc_code_state").unwrap());
    let handed = read(page(APP, to_host(&asked, APP), &app)).await;
    let take = to_host(&handed, CODE);
    assert!(take.starts_with("/_svc/session?code="), "{take}");

    let elsewhere = read(page(CODE, take, "svc_code_state=of-another-browser")).await;
    assert_eq!((elsewhere.status, elsewhere.cookie("svc_code_session")), (StatusCode::UNAUTHORIZED, None));
    assert_eq!(read(page(CODE, take, "")).await.status, StatusCode::UNAUTHORIZED);

    let taken = read(page(CODE, take, &state)).await;
    assert_eq!((taken.status, taken.location()), (StatusCode::FOUND, "/?folder=/home"));
    let code = format!("svc_code_session={}", taken.cookie("svc_code_session").unwrap());
    assert_eq!(with_cookie(&world, CODE, "/", &code).await.status, StatusCode::OK);
    assert_eq!(world.proven(&machine, &machine.last().headers).sub.as_str(), "user_1");
    assert_eq!(read(page(CODE, take, &state)).await.status, StatusCode::UNAUTHORIZED, "once");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handover_leads_to_our_own_host_only_and_not_without_a_session() -> Result<()> {
    let (world, _machine) = World::with_machine("user_1").await?;
    let path = "/_svc/code-session?state=s&return_to=";
    let nobody = read(world.get(APP, path).header("accept", "text/html")).await;
    assert!(nobody.location().starts_with("https://idp.test/in"), "{nobody:?}");
    let app = session(&world, APP, "user_1").await;
    for evil in ["https://evil.test", "//evil.test", "/%5cevil.test", ""] {
        let handed = read(world.get(APP, &format!("{path}{evil}")).header("cookie", &app)).await;
        let take = to_host(&handed, CODE);
        let taken = read(world.get(CODE, take).header("cookie", "svc_code_state=s")).await;
        assert_eq!(taken.location(), "/", "{evil}");
    }
    let no_state = read(world.get(APP, "/_svc/code-session").header("cookie", &app)).await;
    assert_eq!(no_state.status, StatusCode::BAD_REQUEST);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_browser_chooses_among_the_users_slots() -> Result<()> {
    let (world, primary) = World::with_machine("user_1").await?;
    let studio = TestMachine::start().await?;
    world.add(&studio, "user_1", "studio", "running").await?;
    let cookie = session(&world, APP, "user_1").await;
    let began = Instant::now();
    loop {
        let slots = with_cookie(&world, APP, "/_svc/slots", &cookie).await.json();
        if slots["slots"].as_array().is_some_and(|slots| slots.len() == 2) {
            assert_eq!(
                (&slots["slots"][0]["slot"], &slots["slots"][0]["current"]),
                (&"primary".into(), &true.into())
            );
            assert_eq!(
                (&slots["slots"][1]["slot"], &slots["slots"][1]["current"]),
                (&"studio".into(), &false.into())
            );
            break;
        }
        assert!(began.elapsed() < OBEYED_WITHIN);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let choose = |body: &str| {
        let request = world.post(APP, "/_svc/slots").header("cookie", &cookie);
        request.header("content-type", "application/json").body(body.to_owned())
    };
    assert_eq!(read(choose(r#"{"slot":"studio"}"#)).await.status, StatusCode::OK);
    let before = primary.arrivals().len();
    assert_eq!(with_cookie(&world, APP, "/", &cookie).await.status, StatusCode::OK);
    assert_eq!((studio.arrivals().len(), primary.arrivals().len()), (1, before));
    assert_eq!(world.proven(&studio, &studio.last().headers).slot.as_str(), "studio");
    assert_eq!(read(choose(r#"{"slot":"of-another"}"#)).await.status, StatusCode::NOT_FOUND);
    assert_eq!(read(choose(r#"{"slot":"studio","x":1}"#)).await.status, StatusCode::BAD_REQUEST);
    // The chosen one is down: said, and not silently another computer.
    world.set_status(&studio, "recovering").await?;
    let began = Instant::now();
    while with_cookie(&world, APP, "/", &cookie).await.status == StatusCode::OK {
        assert!(began.elapsed() < OBEYED_WITHIN);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(primary.arrivals().len(), before);
    let form = world.post(APP, "/_svc/slots").header("cookie", &cookie);
    let form = form.header("content-type", "application/x-www-form-urlencoded").body("slot=primary");
    assert_eq!(read(form).await.status, StatusCode::SEE_OTHER);
    assert_eq!(with_cookie(&world, APP, "/", &cookie).await.status, StatusCode::OK);
    let page =
        read(world.get(APP, "/_svc/slots").header("cookie", &cookie).header("accept", "text/html")).await;
    assert!(page.body.contains("value=\"studio\"") && page.body.contains("recovering"), "{}", page.body);
    Ok(())
}
