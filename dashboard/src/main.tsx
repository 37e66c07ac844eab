import "./language";

import { render } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";

import "./style.css";

import { get, onSignedOut, signOut } from "./api";
import { useConnection } from "./live";
import { Action, SessionContext } from "./parts";
import { CeleryPage } from "./pages/celery";
import { Failures } from "./pages/failures";
import { JobPage } from "./pages/job";
import { LanePage } from "./pages/lane";
import { Overview } from "./pages/overview";
import { QueuePage } from "./pages/queue";
import { Schedules } from "./pages/schedules";
import { Search } from "./pages/search";
import { SignIn } from "./pages/signin";
import { Workers } from "./pages/workers";
import type { Session } from "./types";
import { ApiError } from "./api";

interface Route {
  parts: string[];
  query: URLSearchParams;
}

function route(): Route {
  const [path = "", search = ""] = location.hash.replace(/^#\/?/, "").split("?", 2);
  let parts: string[];
  try {
    parts = path.split("/").map(decodeURIComponent);
  } catch {
    parts = [""];
  }
  return { parts, query: new URLSearchParams(search) };
}

function useRoute(): Route {
  const [now, setNow] = useState(route);
  useEffect(() => {
    const changed = () => setNow(route());
    window.addEventListener("hashchange", changed);
    return () => window.removeEventListener("hashchange", changed);
  }, []);
  return now;
}

type Theme = "auto" | "light" | "dark";
const THEMES: Theme[] = ["auto", "light", "dark"];

function useTheme(): [Theme, string, () => void] {
  const stored = localStorage.getItem("fairlane-theme") as Theme | null;
  const [theme, setTheme] = useState<Theme>(stored && THEMES.includes(stored) ? stored : "auto");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const [system, setSystem] = useState(dark.matches);
  useEffect(() => {
    const changed = () => setSystem(dark.matches);
    dark.addEventListener("change", changed);
    return () => dark.removeEventListener("change", changed);
  }, []);
  document.documentElement.dataset.theme = theme;
  const next = () => {
    const following = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    localStorage.setItem("fairlane-theme", following);
    setTheme(following);
  };
  return [theme, theme === "auto" ? (system ? "dark" : "light") : theme, next];
}

const EXTEND = 10 * 60_000;

function App() {
  const [session, setSession] = useState<Session | null>(null);
  const [why, setWhy] = useState<string | null>(null);
  const [unreachable, setUnreachable] = useState(false);
  const [theme, drawn, nextTheme] = useTheme();
  useEffect(() => onSignedOut(() => {
    setSession(null);
    setWhy("This service requires a token.");
  }), []);
  useEffect(() => {
    let timer: number | undefined;
    const read = () =>
      get<Session>("/session").then(
        (found) => {
          setUnreachable(false);
          setSession(found);
        },
        (problem: ApiError) => {
          if (problem.status !== 401) {
            setUnreachable(true);
            timer = window.setTimeout(read, 2_000);
          }
        },
      );
    void read();
    // Each visit extends the cookie; a page that stays open is one.
    const extend = window.setInterval(() => void get<Session>("/session").catch(() => undefined), EXTEND);
    return () => {
      clearTimeout(timer);
      clearInterval(extend);
    };
  }, []);
  if (!session) {
    return (
      <>
        <Top session={null} theme={theme} nextTheme={nextTheme} leave={() => Promise.resolve()} />
        {why !== null ? (
          <SignIn why={why} enter={(found) => { setWhy(null); setSession(found); }} />
        ) : (
          <main>
            <p class="quiet">{unreachable ? "The service cannot be reached. Trying again …" : "Opening the dashboard …"}</p>
          </main>
        )}
      </>
    );
  }
  const leave = () => signOut().then(() => {
    setSession(null);
    setWhy("You have signed out.");
  });
  return (
    <SessionContext.Provider value={session}>
      <Top session={session} theme={theme} nextTheme={nextTheme} leave={leave} />
      <Page session={session} theme={drawn} />
      <footer class="quiet">
        Fairlane {session.version} · {session.scopes.includes("operate") ? "you may change things here" : "you may look, not touch"} ·{" "}
        <a href="api/v1/openapi.json">API</a>
      </footer>
    </SessionContext.Provider>
  );
}

const NAV: [string, string][] = [
  ["", "Overview"],
  ["failures", "Failures"],
  ["workers", "Workers"],
  ["schedules", "Schedules"],
];

function Top({ session, theme, nextTheme, leave }: { session: Session | null; theme: Theme; nextTheme: () => void; leave: () => Promise<void> }) {
  const { parts, query } = useRoute();
  const here = parts[0] === "queues" ? "" : parts[0];
  const [draft, setDraft] = useState("");
  useEffect(() => setDraft(parts[0] === "search" ? (query.get("q") ?? "") : ""), [parts.join("/"), query.get("q")]);
  const places = session && !session.bound ? [...NAV, ...(session.features.includes("celery") ? [["celery", "Celery"] as [string, string]] : [])] : NAV.slice(0, 1);
  return (
    <header class="top">
      <a class="skip" href="#main" onClick={(event) => { event.preventDefault(); document.getElementById("main")?.focus(); }}>
        Skip to the page
      </a>
      <a class="brand" href="#/">
        Fairlane
      </a>
      {session && (
        <>
          <nav aria-label="Pages">
            {places.map(([path, name]) => (
              <a key={path} href={`#/${path}`} aria-current={here === path ? "page" : undefined}>
                {name}
              </a>
            ))}
          </nav>
          {!session.bound && (
            <form
              role="search"
              class="find"
              onSubmit={(event) => {
                event.preventDefault();
                if (draft.trim()) location.hash = `#/search?q=${encodeURIComponent(draft.trim())}`;
              }}
            >
              <input type="search" aria-label="Search" placeholder="Id, task, lane, key" value={draft} onInput={(event) => setDraft(event.currentTarget.value)} />
            </form>
          )}
        </>
      )}
      <span class="ends">
        {session && <Status />}
        <button type="button" class="plain-button" onClick={nextTheme} title="Light, dark, or as the system">
          <span aria-hidden="true">◐ </span>
          <span class="sr">Colours: </span>
          {theme}
        </button>
        {session?.cookie && (
          <Action kind="plain-button" run={leave}>
            Sign out
          </Action>
        )}
      </span>
    </header>
  );
}

const WORDS = { idle: "", connecting: "connecting", live: "live", lost: "connection lost, reconnecting", away: "the store does not respond" };

function Status() {
  const state = useConnection();
  const trouble = state === "lost" || state === "away";
  return (
    <>
      <span class={`status ${state}`} role="status" data-connection={state}>
        {state !== "idle" && <span class={`dot ${state === "live" ? "ok" : trouble ? "error" : ""}`} aria-hidden="true" />}
        {trouble ? <b>{WORDS[state]}</b> : WORDS[state]}
      </span>
      {trouble && <div class="lost-line" aria-hidden="true" />}
    </>
  );
}

function Page({ session, theme }: { session: Session; theme: string }) {
  const { parts, query } = useRoute();
  const main = useRef<HTMLElement>(null);
  const first = useRef(true);
  const path = parts.join("/");
  useEffect(() => {
    const place = main.current!;
    const name = () => {
      const title = place.querySelector("h1")?.textContent?.trim();
      const named = title ? `${title.slice(0, 60)} · Fairlane` : "Fairlane";
      if (document.title !== named) document.title = named;
    };
    name();
    // The heading of a job is there once the job is.
    const watch = new MutationObserver(name);
    watch.observe(place, { childList: true, characterData: true, subtree: true });
    if (first.current) first.current = false;
    else {
      window.scrollTo(0, 0);
      place.focus({ preventScroll: true });
    }
    return () => watch.disconnect();
  }, [path]);
  return (
    <main id="main" tabIndex={-1} ref={main} key={path} data-page={path}>
      {content()}
    </main>
  );

  function content() {
    const [place, name, inside, lane] = parts;
    switch (place) {
      case "":
        return <Overview session={session} theme={theme} />;
      case "queues":
        if (name && inside === "lanes") return <LanePage key={path} queue={name} lane={lane === undefined || lane === "" ? null : lane} />;
        return name ? <QueuePage key={name} name={name} /> : <Overview session={session} theme={theme} />;
      case "jobs":
        return <JobPage key={path} id={parts.slice(1).join("/")} />;
      case "failures":
        return <Failures />;
      case "workers":
        return <Workers />;
      case "schedules":
        return <Schedules />;
      case "celery":
        return <CeleryPage />;
      case "search":
        return <Search text={query.get("q") ?? ""} />;
      default:
        return (
          <>
            <h1>There is no such page</h1>
            <p>
              <a href="#/">Back to the overview</a>
            </p>
          </>
        );
    }
  }
}

render(<App />, document.getElementById("app")!);
